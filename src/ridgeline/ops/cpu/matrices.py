"""Pack arrays of a checkpoint into matrices that the kernels read."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, Generic, Literal, TypeVar

import numpy as np

from ridgeline._kernels import Matrix, Norm, Pool
from ridgeline.ops import api
from ridgeline.ops.api import Linear, Op, QuantizedMatrix, Weights
from ridgeline.ops.cpu.coded import pack_codes, refuses_parts, rounds_here, tokens_of
from ridgeline.ops.mapped import release
from ridgeline.spec import LayerNorm, RMSNorm
from ridgeline.spec.quant import Format, has_layout

Ndarray = np.ndarray[Any, Any]
Floats = np.ndarray[Any, np.dtype[np.float32]]
T = TypeVar("T")
Kind = Literal["float32", "bfloat16", "float16"]
Name = Literal["fp32", "bf16", "fp16"]

PLAIN: dict[Kind, Name] = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
# Matrices that one kernel multiplies with at once, by their names in a stage.
TOGETHER = (("q", "k", "v"), ("gate", "up"), ("shared.gate", "shared.up"), ("dense.gate", "dense.up"))


def kind_of(array: Ndarray) -> Kind:
    """Return the type of a matrix's numbers. Raises TypeError for a type that no kernel reads."""
    for kind in PLAIN:
        if array.dtype.name == kind:
            return kind
    raise TypeError(f"a matrix of {array.dtype} is none of {', '.join(PLAIN)}")


def refuses_format(case: Format) -> str | None:
    """Return why no kernel multiplies with matrices of a format; None if one does."""
    return None if has_layout(case) else f"kernels have no layout for {case.name}"


def refuses_weights(op: Op[Any], weights: Weights) -> str | None:
    """Return why no kernel serves a stage over these matrices; None if one does."""
    named = [*weights.linears.items(), *((name, m) for name, all in weights.experts.items() for m in all)]
    for name, linear in named:
        if linear.unfused is not None and op is not api.PRODUCT:
            return f"{name} {linear.unfused}"
        if reason := refuses_format(linear.format) or refuses_parts([linear]):
            return f"{name}: {reason}"
    together = [[weights.linears[n] for n in names if n in weights.linears] for names in TOGETHER]
    gates, ups = weights.experts.get("gate", ()), weights.experts.get("up", ())
    together += [[gate, up] for gate, up in zip(gates, ups, strict=bool(gates))]
    for group in together:
        if reason := refuses_parts(group):
            return f"among matrices that one kernel multiplies with at once, {reason}"
    for all_of in (ups, weights.experts.get("down", ())):
        if len({linear.format for linear in all_of}) > 1:
            return "among matrices that one kernel multiplies with at once, formats differ"
    return None


def build_matrix(pool: Pool, linears: Sequence[Linear], *, interleave: bool = False) -> Matrix:
    """Pack matrices of one hidden size and format, one below the other, and release the pages of their files.

    Plain matrices of different types become float32. Where one matrix comes as codes, the others are rounded first.
    """
    (format,) = {linear.format for linear in linears}
    biases: list[Any] = [linear.bias for linear in linears]
    data: list[Any] = [linear.data for linear in linears]
    is_coded = any(isinstance(part, QuantizedMatrix) for part in data)
    if is_coded or (format.is_lossy and not rounds_here(format)):
        matrix = pack_codes(pool, data, format, biases, interleave)
    else:
        matrix = _pack_floats(pool, data, format, biases, interleave)
    for part in data:
        for array in part.arrays if isinstance(part, QuantizedMatrix) else (part,):
            release(array)
    return matrix


def _pack_floats(pool: Pool, parts: list[Ndarray], format: Format, biases: list[Any], interleave: bool) -> Matrix:
    kinds = {kind_of(part) for part in parts}
    if len(kinds) > 1:
        parts = [part.astype(np.float32) for part in parts]
    kind = kinds.pop() if len(kinds) == 1 else "float32"
    name: Any = format.numbers if format.is_lossy else PLAIN[kind]
    rows, tokens = [dense(part) for part in parts], tokens_of(format)
    return Matrix(pool, rows, kind, name, format.group, biases, interleave, tokens=tokens)


def build_rows(pool: Pool, rows: Ndarray, bias: Floats | None = None) -> Matrix:
    """Pack a matrix in the type of the checkpoint."""
    kind = kind_of(rows)
    return Matrix(pool, [dense(rows)], kind, PLAIN[kind], 0, [bias], False)


def build_norm(case: RMSNorm | LayerNorm, weight: Floats, bias: Floats | None) -> Norm:
    """Build a norm with its weights for the stages."""
    if isinstance(case, LayerNorm):
        return Norm("layer", case.eps, np.float32(case.offset) + weight, bias)
    return Norm("rms", case.eps, np.float32(case.offset) + weight, None)


class PackedOnce(Generic[T]):
    """A function of weights whose result is computed at the first call and kept as long as the first array lives. The
    others must be the same in each call with it.
    """

    def __init__(self, make: Callable[..., T]) -> None:
        self._make = make
        self._found: dict[int, T] = {}

    def __call__(self, array: Ndarray, *others: Ndarray) -> T:
        found = self._found.get(id(array))
        if found is None:
            found = self._found[id(array)] = self._make(array, *others)
            weakref.finalize(array, self._found.pop, id(array), None)
        return found


def once(function: Callable[[Ndarray], Ndarray]) -> PackedOnce[Floats]:
    """Cache a function of weights, by array."""
    return PackedOnce(lambda array: np.ascontiguousarray(function(array), np.float32))


def dense(part: Ndarray) -> Ndarray:
    """Return a matrix in the form that kernels take: dense rows, 16-bit floats as integers."""
    rows = part if part.strides[-1] == part.itemsize or part.shape[-1] == 1 else np.ascontiguousarray(part)
    return rows if rows.dtype == np.float32 else rows.view(np.uint16)
