"""Pack matrices of codes for the kernels, and say which ones can be packed, alone or as one matrix."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from ridgeline._kernels import Matrix, Pool
from ridgeline.ops.api import Linear, QuantizedMatrix
from ridgeline.ops.host.quant import quantize
from ridgeline.spec.quant import NUMBERS, Format

Ndarray = np.ndarray[Any, Any]
HALF_EXPONENT = 16  # the largest float16 numbers are below 2 to this power


def rounds_here(format: Format) -> bool:
    """Return whether the kernels round floats to a format themselves. Others are rounded by numpy."""
    return format.offsets == "none" and format.rows == 1 and not NUMBERS[format.numbers].levels


def tokens_of(format: Format) -> Literal["exact", "bf16", "int8"]:
    """Return how the kernels take the activations of a format for which they have a layout."""
    kind = format.activations
    if kind == "outliers" or kind == "fp8":
        raise ValueError(f"kernels have no layout for {format.name}")
    return kind


def common_factor(parts: Sequence[Any]) -> float | None:
    """Return a power of two such that all scales and minimums of some matrices are float16 numbers times it, or None.

    It is 1 for a format whose scales are float32, and for numbers that are not finite, which no format can have.
    """
    coded = [part for part in parts if isinstance(part, QuantizedMatrix)]
    arrays = [np.asarray(p.scales) for p in coded if p.format.scale_bits == 16]
    arrays += [np.asarray(p.minimums) for p in coded if p.minimums is not None]
    peak = max((float(np.abs(a).max()) for a in arrays), default=0.0)
    if not np.isfinite(peak) or all(_is_half(a) for a in arrays):
        return 1.0
    factor = float(np.ldexp(1.0, int(np.frexp(peak)[1]) - HALF_EXPONENT))
    return factor if all(_is_half(a / np.float32(factor)) for a in arrays) else None


def _is_half(a: Ndarray) -> bool:
    """Return whether all numbers are float16 numbers."""
    with np.errstate(over="ignore"):
        return bool((a.astype(np.float16).astype(np.float32) == a).all())


def refuses_parts(linears: Sequence[Linear]) -> str | None:
    """Return why matrices that one kernel multiplies with at once cannot be packed as one; None if they can."""
    parts = [linear.data for linear in linears]
    if len({linear.format for linear in linears}) > 1:
        return "formats differ"
    if len({order_of(part) for part in parts}) > 1:
        return "permutations of columns differ"
    if len({input_scale(part) for part in parts}) > 1:
        return "scales of the input differ"
    if any(linear.format.block and linear.data.shape[1] % linear.format.block for linear in linears):
        return "rows are no whole number of blocks"
    if common_factor(parts) is None:
        return "scales are no float16 numbers times one power of two"
    return None


def packing_key(linear: Linear) -> tuple[Format, bytes | None, float | None, float | None]:
    """Return what is equal for matrices that can be packed as one."""
    return linear.format, order_of(linear.data), input_scale(linear.data), common_factor([linear.data])


def order_of(part: Any) -> bytes | None:
    """Return the permutation of a matrix's columns as bytes; None if there is none."""
    permutation = part.permutation if isinstance(part, QuantizedMatrix) else None
    return None if permutation is None else np.asarray(permutation).astype(np.int64).tobytes()


def input_scale(part: Any) -> float | None:
    """Return the scale of a matrix's input, if it has one and its activations are rounded to multiples of it."""
    if not isinstance(part, QuantizedMatrix) or part.format.activations in ("exact", "bf16"):
        return None
    return part.input_scale


def pack_codes(pool: Pool, parts: Sequence[Any], format: Format, biases: list[Any], interleave: bool) -> Matrix:
    """Pack matrices of one format, one below the other. Floats among them are rounded first."""
    coded: list[Any] = [part if isinstance(part, QuantizedMatrix) else quantize(format)(part) for part in parts]
    codes: list[Any] = [np.ascontiguousarray(part.codes).view(np.int8) for part in coded]
    offsets: list[Any] = [] if format.offsets == "none" else [getattr(part, format.offsets) for part in coded]
    order = coded[0].permutation
    indices = None if order is None else np.asarray(order).astype(np.int64)
    name: Any = format.numbers
    return Matrix(
        pool, codes, "codes", name, format.group, biases, interleave,
        scales=[np.ascontiguousarray(part.scales) for part in coded], offset_kind=format.offsets,
        offsets=[np.ascontiguousarray(part) for part in offsets], tokens=tokens_of(format),
        wide=format.rows != 1, block=format.block, factors=_given(coded, "factors"),
        min_factors=_given(coded, "min_factors"), permutation=indices,
        factor=common_factor(coded) or 1.0, input_scale=input_scale(coded[0]) or 0.0,
    )  # fmt: skip


def _given(parts: Sequence[Any], name: str) -> list[Ndarray]:
    """Return an array of each matrix that has it."""
    return [np.ascontiguousarray(found) for part in parts if (found := getattr(part, name)) is not None]
