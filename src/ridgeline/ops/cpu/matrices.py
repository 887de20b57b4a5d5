"""Arrays of a checkpoint as matrices that the kernels read."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, Generic, Literal, TypeVar

import numpy as np

from ridgeline._kernels import Matrix, Norm, Pool
from ridgeline.ops.api import Linear
from ridgeline.ops.mapped import release
from ridgeline.spec import LayerNorm, RMSNorm

Ndarray = np.ndarray[Any, Any]
Floats = np.ndarray[Any, np.dtype[np.float32]]
T = TypeVar("T")
Kind = Literal["float32", "bfloat16", "float16"]
Name = Literal["fp32", "bf16", "fp16", "int8", "int4"]

PLAIN: dict[Kind, Name] = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
ROUNDED: dict[int, Name] = {8: "int8", 4: "int4"}  # by bits


def kind_of(array: Ndarray) -> Kind:
    """What a matrix's numbers are. Raises TypeError for a type that no kernel reads."""
    for kind in PLAIN:
        if array.dtype.name == kind:
            return kind
    raise TypeError(f"a matrix of {array.dtype} is none of {', '.join(PLAIN)}")


def build_matrix(pool: Pool, linears: Sequence[Linear], *, interleave: bool = False) -> Matrix:
    """Matrices of one width and format, one below the other; in float32 where they keep types of their own that differ.

    What they came in is let go, as far as it is a file's.
    """
    parts: list[Any] = [linear.weight for linear in linears]
    biases: list[Any] = [linear.bias for linear in linears]
    (format,) = {linear.format for linear in linears}
    kinds = {kind_of(part) for part in parts}
    if len(kinds) > 1:
        parts = [part.astype(np.float32) for part in parts]
    kind = kinds.pop() if len(kinds) == 1 else "float32"
    name = ROUNDED[format.bits] if format.is_lossy else PLAIN[kind]
    matrix = Matrix(pool, [dense(part) for part in parts], kind, name, format.group, biases, interleave)
    for linear in linears:
        release(linear.weight)
    return matrix


def build_rows(pool: Pool, rows: Ndarray) -> Matrix:
    """A matrix as it is stored."""
    kind = kind_of(rows)
    return Matrix(pool, [dense(rows)], kind, PLAIN[kind], 0, [None], False)


def build_norm(case: RMSNorm | LayerNorm, weight: Floats, bias: Floats | None) -> Norm:
    """A norm with its weights, as the stages take it."""
    if isinstance(case, LayerNorm):
        return Norm("layer", case.eps, weight, bias)
    return Norm("rms", case.eps, np.float32(case.offset) + weight, None)


class PackedOnce(Generic[T]):
    """What is made of single arrays, each when it is first asked for, and kept as long as the array lives."""

    def __init__(self, make: Callable[[Ndarray], T]) -> None:
        self._make = make
        self._found: dict[int, T] = {}

    def __call__(self, array: Ndarray) -> T:
        found = self._found.get(id(array))
        if found is None:
            found = self._found[id(array)] = self._make(array)
            weakref.finalize(array, self._found.pop, id(array), None)
        return found


def dense(part: Ndarray) -> Ndarray:
    """A matrix as the kernels take it: rows in one piece, 16-bit numbers as integers."""
    rows = part if part.strides[-1] == part.itemsize or part.shape[-1] == 1 else np.ascontiguousarray(part)
    return rows if rows.dtype == np.float32 else rows.view(np.uint16)
