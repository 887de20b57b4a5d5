"""Bounds of the error of a product with a stored matrix, by its format."""

from __future__ import annotations

from typing import Any

import numpy as np

from ridgeline.spec.quant import OUTLIER, Format

Floats = np.ndarray[Any, np.dtype[np.float64]]

# Half the distance of two neighbors in e4m3: a share of the number, and for small numbers a share of the largest one.
FP8_SHARE, FP8_LEAST = 2.0**-4, 2.0**-10 / 448
# The same for bfloat16; the second is a number.
BF16_SHARE, BF16_LEAST = 2.0**-8, 2.0**-134
# What remains of a number after two slices of bfloat16: the first leaves 2^-8 of it, and the second 2^-9 of that. A
# number that would become infinite is cut off, which leaves a little more: 2^111 of at least 2^128 (1 - 2^-9).
SLICES_SHARE = 2.0**-17 * (1 + 2.0**-8)
FLUSHED = 2.0**-126  # what is lost where a denormal number becomes zero
UNDERFLOW = 2.0**-150  # what rounding loses at most where a result is denormal: half the distance of two neighbors
BLOCK = 32  # columns whose products a matrix unit adds before it adds them to a sum


def bound(
    x: Floats, weight: Floats, bias: Floats, format: Format, minimums: Floats | None = None,
    input_scale: float | None = None, *, in_tiles: bool = False, in_dots: bool = False,
) -> Floats:  # fmt: skip
    """Return the largest error of a product against `x @ weight.T + bias`, [T, out].

    Args:
        x: [T, in]; weight: the dequantized matrix [out, in]; bias: [out]; all in float64.
        minimums: [out, in], what is subtracted from each number, for a matrix that has minimums.
        input_scale: the scale of all activations, for a matrix that has one; larger activations than it allows are not
            covered.
        in_tiles: whether a plain matrix of bfloat16 is multiplied with the arithmetic of a matrix unit. docs/kernels.md
            proves this bound.
        in_dots: whether it is multiplied with the processor's dot products of bf16, which take denormal numbers as
            zeros.
    """
    size = np.abs(weight).T
    if minimums is not None:  # code x scale and the minimum are multiplied and rounded apart
        size = size + 2 * np.abs(minimums).T
    moved = _activation_error(x, format, input_scale, in_tiles)
    added: Floats = moved @ size
    rounded: Floats = (np.abs(x) + moved) @ size + np.abs(bias)
    if in_tiles:
        slices = 1 if format.activations == "bf16" else 2
        blocks = -(-x.shape[1] // BLOCK)
        lost = np.abs(x).sum(1, keepdims=True) + size.sum(0) + slices * (x.shape[1] + 2 * blocks)
        # Both slices of a number are at most 1 + 2^-7 of it together. A product passes at most 16 sums of its chain,
        # the sum of the two chains, a sum for each slice of each block, and the bias.
        terms = BLOCK // 2 + 1 + slices * blocks + 1
        most: Floats = added + gamma(terms) * (1 + 2.0**-7) * rounded + 2 * FLUSHED * lost
        return most
    roundings = _roundings(format, x.shape[1])
    chain: Floats = added + gamma(roundings) * rounded + UNDERFLOW * roundings
    if in_dots:  # denormal numbers in tokens and weights, and a denormal sum after each column
        chain += 2 * FLUSHED * (np.abs(x).sum(1, keepdims=True) + size.sum(0) + x.shape[1])
    return chain


# A number in bfloat16 slices differs from it by this share of it: the first has 8 bits, and the second 8 bits of the
# rest, which is at most 2^-8 of the number's power of two. Neighbors below 2^-126 have a fixed distance.
SLICE_SHARE, SLICE_LEAST = {1: 2.0**-8, 2: 2.0**-17}, 2.0**-134


def sliced_bound(
    x: Floats, weight: Floats, bias: Floats, format: Format, slices: int, *, is_wide: bool = False
) -> Floats:
    """Return the largest error of a product of the triton backend with exact activations, as `bound` does.

    is_wide: whether the matrix is in float16 or float32, so that its numbers are two slices, too.

    Each number of a token becomes `slices` bfloat16 numbers, whose products with the matrix are exact. The units of
    GPUs add them up in float32, but may cut a sum where others round it, so one addition may err by 2^-23.
    """
    size = np.abs(weight).T
    moved = SLICE_SHARE[slices] * np.abs(x) + SLICE_LEAST
    terms = slices * x.shape[1] + format.num_groups(x.shape[1]) + 8  # splits, the scale and the bias take eight
    taken: Floats = (1 + 2.0**-7) * np.abs(x) + moved  # by both slices
    found: Floats = moved @ size
    if is_wide:
        found += taken @ (SLICE_SHARE[2] * size + SLICE_LEAST)
        size, terms = (1 + 2.0**-7) * size + SLICE_LEAST, terms + slices * x.shape[1]
    found += gamma(terms, 2.0**-23) * (taken @ size + np.abs(bias))
    return found


def gamma(terms: int, unit: float = 2.0**-24) -> float:
    """Return the relative error of `terms` roundings to float32 in a row (Higham, Accuracy and Stability of Numerical
    Algorithms, 3.1). unit: the largest relative error of one."""
    return terms * unit / (1 - terms * unit)


def _activation_error(x: Floats, format: Format, input_scale: float | None, in_tiles: bool) -> Floats:
    """Return the largest change of each activation by its rounding, [T, in]."""
    if format.activations == "exact":
        return SLICES_SHARE * np.abs(x) if in_tiles else np.zeros_like(x)
    if format.activations == "bf16":
        nearest: Floats = BF16_SHARE * np.abs(x) + BF16_LEAST
        return nearest
    rest = np.where(np.abs(x) >= OUTLIER, 0, x) if format.activations == "outliers" else x
    peak = np.abs(rest).max(1, keepdims=True, initial=0.0)
    if format.activations == "fp8":
        least = FP8_LEAST * peak if input_scale is None else np.full_like(peak, input_scale * 2.0**-10)
        moved: Floats = (FP8_SHARE * np.abs(x) + least) * (1 + 2.0**-20)
        return moved
    step = peak / 127 if input_scale is None else np.full_like(peak, input_scale)
    half: Floats = (0.5 + 2.0**-15) * np.broadcast_to(step, x.shape) * (rest != 0)
    return half


def _roundings(format: Format, columns: int) -> int:
    """Return the number of roundings to float32 that a term of the sum passes."""
    if format.activations in ("exact", "bf16", "fp8"):
        # One for each column, the bias and, where codes are multiplied before their scale, the scale and the matrix.
        return columns + (4 if format.is_lossy else 1)
    # Sums of whole numbers are exact: what remains are sums over groups, the scales, and the bias.
    # The sum over a block may be greater than 2^24, and is then rounded.
    groups = format.num_scales(columns) + (3 if format.block else 2) if format.group else 5
    minimums = format.num_scales(columns) + 2 if format.offsets == "minimums" else 0
    return groups + minimums + (columns + 4 if format.activations == "outliers" else 0)
