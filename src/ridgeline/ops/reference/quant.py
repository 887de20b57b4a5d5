"""Matrices rounded to nearest, and products of tokens that are rounded too."""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline.ops.reference.primitives import WIDEN_BLOCK
from ridgeline.spec.quant import Format

LEAST = 2.0**-100  # a magnitude below has no inverse: it counts as zero


def quantize(case: Format):
    def run(weight: Tensor) -> tuple[Tensor, Tensor]:
        group = case.group or weight.shape[1]
        wide = weight.float()
        parts = wide.split(group, 1)
        peaks = torch.stack([part.abs().amax(1) for part in parts], 1)
        if case.bits == 8:
            scales = torch.where(peaks > LEAST, peaks / 127, 0 * peaks)  # an infinity or a NaN stays
            inverse = torch.where(peaks > LEAST, over(127, peaks), torch.zeros_like(peaks))
        else:
            scales = (peaks / 7.5).half().float()
            inverse = torch.where(scales > 0, over(1, scales), torch.zeros_like(scales))
        if not scales.isfinite().all():
            raise ValueError(f"a weight is not finite, or too large for {case.name}")
        low, high = (-127, 127) if case.bits == 8 else (-8, 7)
        return (wide * spread(inverse, wide.shape[1], group)).round().clamp(low, high).to(torch.int8), scales

    return run


def dequantize(case: Format):
    def run(codes: Tensor, scales: Tensor) -> Tensor:
        return codes.float() * spread(scales, codes.shape[1], case.group or codes.shape[1])

    return run


def over(number: int, x: Tensor) -> Tensor:
    """number / x, rounded once; what torch makes of the plain spelling is number * (1 / x)."""
    return torch.full_like(x, number) / x


def spread(scales: Tensor, columns: int, group: int) -> Tensor:
    """[out, groups] -> [out, columns]."""
    return scales.repeat_interleave(group, 1)[:, :columns]


def quantized_linear(case: Format):
    def run(x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
        steps, scale = _tokens(x)
        group = case.group or codes.shape[1]
        rows = max(1, WIDEN_BLOCK // codes.shape[1])
        outputs = []
        for some, of_group in zip(codes.split(rows), scales.split(rows), strict=True):
            total = torch.zeros((), dtype=torch.float64, device=x.device)
            for part, number, one in zip(steps.split(group, -1), some.split(group, 1), of_group.unbind(1), strict=True):
                total = total + part @ number.to(part.dtype).T * one
            outputs.append(total.to(x.dtype))
        out = torch.cat(outputs, -1) * scale
        return out if bias is None else out + bias

    return run


def _tokens(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [..., in] as whole numbers up to 127, in float64 where their sums are exact; what a token's are multiplied by,
    [..., 1].
    """
    peak = x.abs().amax(-1, keepdim=True).clamp_min(LEAST)
    is_finite = peak.isfinite()
    steps = torch.where(is_finite, (x * over(127, peak)).round(), torch.zeros_like(x))
    return steps.double(), torch.where(is_finite, peak / 127, torch.full_like(peak, torch.nan))
