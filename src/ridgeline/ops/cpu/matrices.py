"""Arrays of a checkpoint as matrices that the kernels read."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from ridgeline._kernels import Matrix, Norm, Pool
from ridgeline.spec import LayerNorm, RMSNorm

Ndarray = np.ndarray[Any, Any]
Floats = np.ndarray[Any, np.dtype[np.float32]]
Kind = Literal["float32", "bfloat16", "float16"]
Format = Literal["fp32", "bf16", "fp16", "int8", "int4"]

FORMATS: dict[Kind, Format] = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


def kind_of(array: Ndarray) -> Kind:
    """What a matrix's numbers are. Raises TypeError for a type that no kernel reads."""
    for kind in FORMATS:
        if array.dtype.name == kind:
            return kind
    raise TypeError(f"a matrix of {array.dtype} is none of {', '.join(FORMATS)}")


def build_matrix(
    pool: Pool, parts: Sequence[Ndarray], biases: Sequence[Floats | None], *, interleave: bool = False
) -> Matrix:
    """Parts [rows, columns], one below the other, in their own type; in float32 if theirs differ."""
    kinds = {kind_of(part) for part in parts}
    if len(kinds) > 1:
        return build_matrix(pool, [part.astype(np.float32) for part in parts], biases, interleave=interleave)
    kind = kinds.pop()
    return Matrix(pool, [dense(part) for part in parts], kind, FORMATS[kind], 0, biases, interleave)


def build_norm(case: RMSNorm | LayerNorm, weight: Floats, bias: Floats | None) -> Norm:
    """A norm with its weights, as the stages take it."""
    if isinstance(case, LayerNorm):
        return Norm("layer", case.eps, weight, bias)
    return Norm("rms", case.eps, np.float32(case.offset) + weight, None)


class PackedOnce:
    """Matrices of single arrays, each packed when it is first asked for, and kept as long as the array lives."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._found: dict[int, Matrix] = {}

    def __call__(self, weight: Ndarray) -> Matrix:
        found = self._found.get(id(weight))
        if found is None:
            found = self._found[id(weight)] = build_matrix(self._pool, [weight], [None])
            weakref.finalize(weight, self._found.pop, id(weight), None)
        return found


def dense(part: Ndarray) -> Ndarray:
    """A matrix as the kernels take it: rows in one piece, 16-bit numbers as integers."""
    rows = part if part.strides[-1] == part.itemsize or part.shape[-1] == 1 else np.ascontiguousarray(part)
    return rows if rows.dtype == np.float32 else rows.view(np.uint16)
