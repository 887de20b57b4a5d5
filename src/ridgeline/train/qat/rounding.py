"""Round weights and activations in the forward pass, with gradients as if rounding did nothing.

A weight that is inside of the range of its group passes its gradient on unchanged (straight-through, arXiv:1308.3432);
one that is outside passes none. Scales get the gradient of LSQ (arXiv:1902.08153), zero points that of LSQ+
(arXiv:2004.09576).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ridgeline.spec.quant import NUMBERS, OUTLIER, Format

FP8_MOST = 448.0


class Rounded(NamedTuple):
    """Groups of weights [out, groups, columns of a group], rounded.

    codes: whole numbers, or numbers of the type where it is a float type. scale, zero: [out, groups, 1], as they are
    stored. steps: the weights in units of the scale.
    """

    codes: Tensor
    scale: Tensor
    zero: Tensor
    steps: Tensor

    @property
    def levels(self) -> Tensor:
        """Return the numbers that the codes stand for, in units of the scale."""
        return self.codes - self.zero

    def weights(self) -> Tensor:
        """Return the numbers that the codes stand for."""
        return self.levels * self.scale


def check_format(format: Format) -> None:
    """Raise ValueError for a format whose codes cannot be learned."""
    if format.rows != 1 or format.offsets == "minimums" or (NUMBERS[format.numbers].levels and format.numbers != "fp8"):
        raise ValueError(
            f"codes in {format.name} are not learned: take whole numbers or fp8, with scales by row or group"
        )


def least_scale(format: Format) -> float:
    """Return the smallest scale: the smallest one of its type for groups, or one that has an inverse in float32."""
    return 2.0**-24 if format.scale_bits == 16 else 2.0**-100


def stored_scale(format: Format, scale: Tensor) -> Tensor:
    """Return scales as the format stores them: rounded to float16 where groups have them, and never 0."""
    stored = scale.half().float() if format.scale_bits == 16 else scale
    return stored.clamp_min(least_scale(format))


def step_of(format: Format) -> float:
    """Return the distance of neighboring numbers, in units of the scale.

    For e4m3 it is that of the numbers from 128 to 256, the typical ones of a group whose largest magnitude is 448.
    """
    return 16.0 if NUMBERS[format.numbers].levels else 1.0


def code_limits(format: Format) -> tuple[float, float]:
    """Return the least and the largest code, or number of a float type, to which weights are rounded."""
    numbers = NUMBERS[format.numbers]
    if numbers.levels:
        return -FP8_MOST, FP8_MOST
    is_even = format.numbers == "int8" and format.offsets == "none"
    return float(-numbers.high if is_even else numbers.low), float(numbers.high)


def round_groups(format: Format, groups: Tensor, scale: Tensor, zero: Tensor) -> Rounded:
    """Return groups of weights [out, groups, columns] rounded to nearest; scale, zero: [out, groups]."""
    low, high = code_limits(format)
    scale = stored_scale(format, scale)[..., None]
    zero = zero.round().clamp(low, high)[..., None]
    steps = groups / scale
    if NUMBERS[format.numbers].levels:
        codes = steps.clamp(low, high).to(torch.float8_e4m3fn).float()
    else:
        codes = (steps.round() + zero).clamp(low, high)
    return Rounded(codes, scale, zero, steps)


def grouped(format: Format, weight: Tensor) -> Tensor:
    """Return a matrix [out, in] as [out, groups, columns of a group]; a short last group is filled with zeros."""
    rows, columns = weight.shape
    width = format.group or columns
    return F.pad(weight, (0, -columns % width)).view(rows, -1, width)


def ungrouped(groups: Tensor, columns: int) -> Tensor:
    """Return groups [out, groups, columns of a group] as a matrix [out, in]."""
    return groups.reshape(len(groups), -1)[:, :columns].contiguous()


class _RoundWeights(torch.autograd.Function):
    """(weight [out, in], scale, zero [out, groups]) -> the rounded matrix [out, in]."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, scale: Tensor, zero: Tensor, format: Format) -> Tensor:
        found = round_groups(format, grouped(format, weight), scale, zero)
        low, high = code_limits(format)
        # A weight is outside if its code was clamped.
        shifted = found.steps if NUMBERS[format.numbers].levels else found.steps.round() + found.zero
        inside = (shifted >= low) & (shifted <= high)
        ctx.save_for_backward(inside, torch.where(inside, found.levels - found.steps, found.levels), found.scale)
        ctx.format, ctx.columns = format, weight.shape[1]
        return ungrouped(found.weights(), weight.shape[1])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        inside, slope, scale = ctx.saved_tensors
        by_group = grouped(ctx.format, gradients[0])
        factor = gradient_factor(ctx.format, ctx.columns)
        weight = ungrouped(by_group * inside, ctx.columns)
        zero = torch.where(inside, 0, by_group).sum(2) * -scale[..., 0]
        return weight, (by_group * slope).sum(2) * factor, zero * factor, None


def gradient_factor(format: Format, columns: int) -> float:
    """Return the factor of the gradients of scales and zero points: 1 / sqrt(numbers of a group x largest code)."""
    return float(((format.group or columns) * code_limits(format)[1]) ** -0.5)


def round_weights(format: Format, weight: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """Return a matrix [out, in] rounded to nearest, with gradients for the matrix, its scales and its zero points.

    scale, zero: [out, groups] in float32; they are rounded as the format stores them.
    """
    apply: Any = _RoundWeights.apply  # torch gives it no types
    found: Tensor = apply(weight, scale, zero, format)
    return found


def round_activations(format: Format, x: Tensor) -> Tensor:
    """Return activations [..., in] rounded as the format says, with the gradient of x itself."""
    if format.activations == "exact":
        return x
    with torch.no_grad():
        is_exact = x.abs() >= OUTLIER if format.activations == "outliers" else torch.zeros_like(x, dtype=torch.bool)
        rest = torch.where(is_exact, 0, x)
        most = FP8_MOST if format.activations == "fp8" else 127.0
        scale = rest.abs().amax(-1, keepdim=True).clamp_min(2.0**-100) / most
        steps = (rest / scale).clamp(-most, most)
        steps = steps.to(torch.float8_e4m3fn).float() if format.activations == "fp8" else steps.round()
        moved = torch.where(is_exact, x, steps * scale) - x
    return x + moved
