"""Quantized matrices and their products, in torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from ridgeline.ops.api import QuantizedMatrix
from ridgeline.ops.reference.primitives import WIDEN_BLOCK
from ridgeline.ops.reference.primitives import linear as plain_linear
from ridgeline.ops.reference.stored import FP8_MOST, to_fp8
from ridgeline.spec.quant import NUMBERS, OUTLIER, Format

LEAST = 2.0**-100  # a smaller magnitude has no inverse in float32: it counts as zero


class Matrix(Protocol):
    """A QuantizedMatrix whose arrays are tensors."""

    codes: Tensor
    scales: Tensor
    zero_points: Tensor | None
    permutation: Tensor | None
    minimums: Tensor | None
    factors: Tensor | None
    min_factors: Tensor | None
    input_scale: float | None


def quantize(case: Format):
    numbers = NUMBERS[case.numbers]

    def run(weight: Tensor) -> QuantizedMatrix:
        if case.offsets == "minimums" or (numbers.levels and case.numbers != "fp8"):
            raise ValueError(f"nothing is rounded to {case.name} here: such matrices come from checkpoints")
        group = case.group or weight.shape[1]
        wide = weight.float()
        parts = wide.split(group, 1)
        zero_points = None
        if case.offsets == "zero_points":
            low, high = (
                torch.stack([f(part, 1) for part in parts], 1)
                for f in (lambda p, d: p.amin(d).clamp_max(0), lambda p, d: p.amax(d).clamp_min(0))
            )
            scales, inverse, zero_points = _asymmetric(case, low, high)
        else:
            peaks = _shared(case, torch.stack([part.abs().amax(1) for part in parts], 1))
            scales, inverse = _symmetric(case, peaks)
        if not scales.isfinite().all():
            raise ValueError(f"a weight is not finite, or too large for {case.name}")
        steps = wide * spread(inverse, wide.shape[1], group)
        if numbers.levels:
            return QuantizedMatrix(case, to_fp8(steps), scales)
        codes = steps.round()
        if zero_points is not None:
            codes = codes + spread(zero_points, wide.shape[1], group)
            zero_points = zero_points.to(torch.int8)
        least = -numbers.high if case.numbers == "int8" and zero_points is None else numbers.low
        return QuantizedMatrix(case, codes.clamp(least, numbers.high).to(torch.int8), scales, zero_points)

    return run


def _shared(case: Format, peaks: Tensor) -> Tensor:
    """Return the largest magnitude of all rows that share a scale, [out, groups], for each row."""
    if case.rows == 1:
        return peaks
    return torch.cat([block.amax(0, keepdim=True).expand_as(block) for block in peaks.split(case.rows or len(peaks))])


def _symmetric(case: Format, peaks: Tensor) -> tuple[Tensor, Tensor]:
    """Return scales and their inverses for groups with these largest magnitudes."""
    steps = NUMBERS[case.numbers].steps
    if case.scale_bits == 16:
        return _half(peaks / steps)
    scales = torch.where(peaks > LEAST, peaks / steps, 0 * peaks)  # infinities and NaN stay
    return scales, torch.where(peaks > LEAST, over(steps, peaks), torch.zeros_like(peaks))


def _asymmetric(case: Format, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return scales, their inverses and zero points for groups from `low` to `high`, which contain 0."""
    numbers = NUMBERS[case.numbers]
    wide = (high - low) / (numbers.high - numbers.low)
    if case.scale_bits == 16:
        scales, inverse = _half(wide)
    else:
        scales = torch.where(wide > LEAST, wide, 0 * wide)
        inverse = torch.where(scales > LEAST, over(1, scales), torch.zeros_like(scales))
    return scales, inverse, (numbers.low - low * inverse).round().clamp(numbers.low, numbers.high)


def _half(scales: Tensor) -> tuple[Tensor, Tensor]:
    """Return scales rounded to float16, and their inverses."""
    scales = scales.half().float()
    return scales, torch.where(scales > 0, over(1, scales), torch.zeros_like(scales))


def dequantize(case: Format):
    def run(matrix: Matrix) -> Tensor:
        wide = _dense(case, matrix, slice(None))
        if matrix.permutation is None:
            return wide
        return torch.empty_like(wide).index_copy(1, matrix.permutation, wide)

    return run


def rows(dtype: torch.dtype):
    return lambda matrix, ids: dequantize(matrix.format)(matrix.rows(ids)).to(dtype)


def quantized_linear(case: Format):
    ways = {"exact": _exact, "bf16": _bf16, "fp8": _fp8, "int8": _int8, "outliers": _outliers}
    multiply = ways[case.activations]

    def run(x: Tensor, matrix: Matrix, bias: Tensor | None) -> Tensor:
        out = multiply(case, x if matrix.permutation is None else x[..., matrix.permutation], matrix)
        return out if bias is None else out + bias

    return run


def _blocks(matrix: Matrix) -> Iterator[slice]:
    """Yield ranges of rows whose numbers stay in the cache as floats."""
    height, width = matrix.codes.shape
    block = max(1, WIDEN_BLOCK // width)
    for start in range(0, height, block):
        yield slice(start, start + block)


def _exact(case: Format, x: Tensor, matrix: Matrix) -> Tensor:
    return torch.cat([plain_linear(x, _dense(case, matrix, some).to(x.dtype), None) for some in _blocks(matrix)], -1)


def round_bf16(x: Tensor) -> Tensor:
    return x.bfloat16().to(x.dtype)


def _bf16(case: Format, x: Tensor, matrix: Matrix) -> Tensor:
    return _exact(case, round_bf16(x), matrix)


def _fp8(case: Format, x: Tensor, matrix: Matrix) -> Tensor:
    """Round each token to e4m3, with its largest magnitude as 448, and multiply the rounded numbers."""
    scale, _ = token_scales(x, FP8_MOST, matrix.input_scale)
    codes = to_fp8((x / scale).clamp(-FP8_MOST, FP8_MOST).float())
    rounded = codes.view(torch.float8_e4m3fn).to(x.dtype) * scale
    return _exact(case, rounded, matrix)


def _int8(case: Format, x: Tensor, matrix: Matrix) -> Tensor:
    """Round each token to 255 steps. The sum over a group is exact, and is rounded before the scale multiplies it.

    Kernels on every device compute these bits; only with blocks or minimums do they differ, within the bound.
    """
    scale, inverse = token_scales(x, 127, matrix.input_scale)
    steps = torch.where(scale.isfinite(), (x * inverse).round().clamp(-127, 127), torch.zeros_like(x)).double()
    group = case.group or matrix.codes.shape[1]
    parts = steps.split(group, -1)
    outputs = []
    for some in _blocks(matrix):
        numbers = _numbers(case, matrix, some).double().split(group, 1)
        scales, minimums = _of_groups(case, matrix, some)
        kind = torch.float64 if case.block or minimums is not None else x.dtype
        total = torch.zeros((), dtype=kind, device=x.device)
        for g, (part, number) in enumerate(zip(parts, numbers, strict=True)):
            total = total + (part @ number.T).to(kind) * scales[:, g].to(kind)
            if minimums is not None:
                total = total - part.sum(-1, keepdim=True) * minimums[:, g]
        outputs.append(total.to(x.dtype))
    return torch.cat(outputs, -1) * scale


def _outliers(case: Format, x: Tensor, matrix: Matrix) -> Tensor:
    """Multiply magnitudes of at least OUTLIER exactly, and the others as `_int8` does."""
    large = (x.abs() >= OUTLIER) & x.isfinite().all(-1, keepdim=True)
    zero = torch.zeros_like(x)
    return _int8(case, torch.where(large, zero, x), matrix) + _exact(case, torch.where(large, x, zero), matrix)


def _dense(case: Format, matrix: Matrix, rows: slice) -> Tensor:
    """Return rows of the matrix in the order of its codes, float32."""
    columns = matrix.codes.shape[1]
    group = case.group or columns
    scales, minimums = _of_groups(case, matrix, rows)
    wide = _numbers(case, matrix, rows) * spread(scales, columns, group)
    return wide if minimums is None else wide - spread(minimums, columns, group)


def _of_groups(case: Format, matrix: Matrix, rows: slice) -> tuple[Tensor, Tensor | None]:
    """Return the scales and minimums of the groups of some rows, [rows, groups]."""
    scales, minimums = matrix.scales[rows], None if matrix.minimums is None else matrix.minimums[rows]
    if matrix.factors is not None:
        factors = matrix.factors[rows]
        scales = spread(scales, factors.shape[1], case.block // case.group) * factors
    if minimums is not None and matrix.min_factors is not None:
        factors = matrix.min_factors[rows]
        minimums = spread(minimums, factors.shape[1], case.block // case.group) * factors
    return scales, minimums


def _numbers(case: Format, matrix: Matrix, rows: slice) -> Tensor:
    """Return the numbers of rows of codes, without their zero points, in float32."""
    codes, levels = matrix.codes[rows], NUMBERS[case.numbers].levels
    if levels:
        return torch.tensor(levels, dtype=torch.float32, device=codes.device)[codes.long()]
    wide = codes.float()
    if matrix.zero_points is None:
        return wide
    return wide - spread(matrix.zero_points[rows].float(), wide.shape[1], case.group or wide.shape[1])


def token_scales(x: Tensor, most: int, given: float | None) -> tuple[Tensor, Tensor]:
    """Return the scale of each token and its inverse, [..., 1]: those of its matrix where it has them.

    The scale of a token that is not finite is NaN.
    """
    peak = x.abs().amax(-1, keepdim=True).clamp_min(LEAST)
    scale = peak / peak.new_full((), most)  # a GPU would multiply with the inverse of a number of Python
    inverse = over(most, peak)
    if given is not None:
        scale = torch.full_like(peak, given)
        inverse = over(1, scale)
    return torch.where(peak.isfinite(), scale, torch.full_like(peak, torch.nan)), inverse


def over(number: float, x: Tensor) -> Tensor:
    """Return number / x, rounded once; torch computes `number / x` as number * (1 / x)."""
    return torch.full_like(x, number) / x


def spread(scales: Tensor, columns: int, group: int) -> Tensor:
    """Repeat a number for each group for each column: [out, groups] -> [out, columns]."""
    return scales.repeat_interleave(group, 1)[:, :columns]
