"""Quantized matrices and products with rounded tokens, in torch."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from ridgeline.ops.api import QuantizedMatrix
from ridgeline.ops.reference.primitives import WIDEN_BLOCK
from ridgeline.spec.quant import CODES, Format

LEAST = 2.0**-100  # a smaller magnitude has no inverse in float32: it counts as zero


def _int8_scales(peaks: Tensor) -> tuple[Tensor, Tensor]:
    scales = torch.where(peaks > LEAST, peaks / 127, 0 * peaks)  # infinities and NaN stay
    return scales, torch.where(peaks > LEAST, over(127, peaks), torch.zeros_like(peaks))


def _int4_scales(peaks: Tensor) -> tuple[Tensor, Tensor]:
    scales = (peaks / 7.5).half().float()
    return scales, torch.where(scales > 0, over(1, scales), torch.zeros_like(scales))


# Scheme -> a function from the largest magnitudes of groups to scales and their inverses.
ROUNDINGS = {"int8": _int8_scales, "int4": _int4_scales}


class Matrix(Protocol):
    """A QuantizedMatrix whose arrays are tensors."""

    codes: Tensor
    scales: Tensor
    zero_points: Tensor | None
    permutation: Tensor | None


def quantize(case: Format):
    scales_of, (low, high) = ROUNDINGS[case.scheme], CODES[case.scheme]

    def run(weight: Tensor) -> QuantizedMatrix:
        group = case.group or weight.shape[1]
        wide = weight.float()
        scales, inverse = scales_of(torch.stack([part.abs().amax(1) for part in wide.split(group, 1)], 1))
        if not scales.isfinite().all():
            raise ValueError(f"a weight is not finite, or too large for {case.name}")
        codes = (wide * spread(inverse, wide.shape[1], group)).round().clamp(low, high).to(torch.int8)
        return QuantizedMatrix(case, codes, scales)

    return run


def dequantize(case: Format):
    def run(matrix: Matrix) -> Tensor:
        columns = matrix.codes.shape[1]
        wide = _numbers(matrix, case.group or columns) * spread(matrix.scales, columns, case.group or columns)
        if matrix.permutation is None:
            return wide
        return torch.empty_like(wide).index_copy(1, matrix.permutation, wide)

    return run


def _numbers(matrix: Matrix, group: int) -> Tensor:
    """Return the codes without their zero points, in float32: whole numbers."""
    wide = matrix.codes.float()
    if matrix.zero_points is None:
        return wide
    return wide - spread(matrix.zero_points.float(), wide.shape[1], group)


def over(number: int, x: Tensor) -> Tensor:
    """Return number / x, rounded once; torch computes `number / x` as number * (1 / x)."""
    return torch.full_like(x, number) / x


def spread(scales: Tensor, columns: int, group: int) -> Tensor:
    """Repeat a number for each group for each column: [out, groups] -> [out, columns]."""
    return scales.repeat_interleave(group, 1)[:, :columns]


def quantized_linear(case: Format):
    def run(x: Tensor, matrix: Matrix, bias: Tensor | None) -> Tensor:
        codes = matrix.codes
        steps, scale = _tokens(x if matrix.permutation is None else x[..., matrix.permutation])
        group = case.group or codes.shape[1]
        numbers = codes if matrix.zero_points is None else _numbers(matrix, group)
        rows = max(1, WIDEN_BLOCK // codes.shape[1])
        outputs = []
        for some, of_group in zip(numbers.split(rows), matrix.scales.split(rows), strict=True):
            total = torch.zeros((), dtype=torch.float64, device=x.device)
            for part, number, one in zip(steps.split(group, -1), some.split(group, 1), of_group.unbind(1), strict=True):
                total = total + part @ number.to(part.dtype).T * one
            outputs.append(total.to(x.dtype))
        out = torch.cat(outputs, -1) * scale
        return out if bias is None else out + bias

    return run


def _tokens(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return x [..., in] as whole numbers of at most 127, and the scale of each token [..., 1].

    The numbers are in float64, in which their sums are exact.
    """
    peak = x.abs().amax(-1, keepdim=True).clamp_min(LEAST)
    is_finite = peak.isfinite()
    steps = torch.where(is_finite, (x * over(127, peak)).round(), torch.zeros_like(x))
    return steps.double(), torch.where(is_finite, peak / 127, torch.full_like(peak, torch.nan))
