"""Quantize blocks of 256 weights to Q4_K and Q6_K: search the scales that minimize the squared error.

A group's scale is tried at several sizes around the one that maps its range onto all codes. For the codes that each
size gives, the best scale (and minimum) follows by least squares; the size with the least error is kept. The scales of
a block are then rounded to whole numbers times one float16, and the codes are chosen again for the rounded scales.
Squared errors are multiplied with weights, one for each number.
"""

from __future__ import annotations

import numpy as np

from ridgeline.load.gguf.codes import Floats, Parts

# Sizes that are tried: steps of 0.1 codes around the full range.
_SYMMETRIC = np.arange(-9, 10) * np.float32(0.1)
_WITH_MINIMUM = np.arange(-10, 11) * np.float32(0.1)
_HALF_MOST = 65504.0


def q6_k(x: Floats, weights: Floats) -> Parts:
    """Return codes from -32 to 31 of blocks [n, 256]: 16 groups, with factors of 8 bits."""
    groups = x.reshape(len(x), 16, 16)
    scales = _symmetric_scales(groups, 32, weights.reshape(groups.shape))
    largest = np.take_along_axis(scales, np.abs(scales).argmax(axis=1, keepdims=True), axis=1)
    step = rounded(largest / np.float32(-128))
    factors = np.rint(scales * inverse(step)).clip(-128, 127)
    codes = np.rint(groups * inverse(step * factors)[..., None]).clip(-32, 31)
    return Parts(codes.astype(np.int8).reshape(len(x), 256), step[:, 0], factors.astype(np.int8))


def q4_k(x: Floats, weights: Floats) -> Parts:
    """Return codes from 0 to 15 of blocks [n, 256]: 8 groups, with factors of scales and of minima of 6 bits."""
    groups = x.reshape(len(x), 8, 32)
    scales, minima = _scales_and_minima(groups, 15, weights.reshape(groups.shape))
    step, min_step = (rounded(v.max(axis=1, keepdims=True) / np.float32(63)) for v in (scales, minima))
    factors = np.rint(scales * inverse(step)).clip(0, 63)
    min_factors = np.rint(minima * inverse(min_step)).clip(0, 63)
    above = groups + (min_step * min_factors)[..., None]
    codes = np.rint(above * inverse(step * factors)[..., None]).clip(0, 15)
    return Parts(
        codes.astype(np.int8).reshape(len(x), 256), step[:, 0], factors.astype(np.uint8), min_step[:, 0],
        min_factors.astype(np.uint8),
    )  # fmt: skip


def rounded(x: Floats) -> Floats:
    """Return numbers rounded to float16. Raises ValueError if one is too large."""
    if x.size and not (largest := float(np.abs(x).max())) <= _HALF_MOST:
        raise ValueError(f"has a number or a scale of {largest:g}, but float16 only reaches 65504")
    return x.astype(np.float16).astype(np.float32)


def inverse(x: Floats) -> Floats:
    """Return 1 / x, and 0 for 0."""
    return np.divide(np.float32(1), x, out=np.zeros_like(x), where=x != 0)


def _symmetric_scales(groups: Floats, most: int, weights: Floats) -> Floats:
    """Return the scale of each group [..., numbers] for codes from -most to most - 1."""
    largest = np.take_along_axis(groups, np.abs(groups).argmax(axis=-1, keepdims=True), axis=-1)
    best, scales = np.zeros(groups.shape[:-1], np.float32), np.zeros(groups.shape[:-1], np.float32)
    weighted = groups * weights
    for change in _SYMMETRIC:
        codes = np.rint(groups * (-(most + change) * inverse(largest))).clip(-most, most - 1)
        both, squares = np.einsum("...i,...i", weighted, codes), np.einsum("...i,...i,...i", weights, codes, codes)
        scale = both * inverse(squares)
        gain = both * scale  # by which this scale lowers the sum of squared errors below that of zeros
        better = gain > best
        best[better], scales[better] = gain[better], scale[better]
    return scales


def _scales_and_minima(groups: Floats, most: int, weights: Floats) -> tuple[Floats, Floats]:
    """Return scales and minima of groups [..., numbers], neither negative, for codes from 0 to most."""
    low = np.minimum(groups.min(axis=-1, keepdims=True), 0)
    spread = groups.max(axis=-1, keepdims=True) - low
    weighted = groups * weights
    count, total = weights.sum(axis=-1), weighted.sum(axis=-1)
    scales, minima = spread[..., 0] / np.float32(most), -low[..., 0]
    best = np.full(groups.shape[:-1], np.inf, np.float32)
    for change in _WITH_MINIMUM:
        codes = np.rint((groups - low) * ((most + change) * inverse(spread))).clip(0, most)
        ones, squares = np.einsum("...i,...i", weights, codes), np.einsum("...i,...i,...i", weights, codes, codes)
        both = np.einsum("...i,...i", weighted, codes)
        divisor = count * squares - ones * ones
        scale = (count * both - total * ones) * inverse(divisor)
        minimum = (ones * both - squares * total) * inverse(divisor)
        at_zero = (minimum < 0) | (divisor <= 0)  # the best minimum is none
        scale = np.maximum(np.where(at_zero, both * inverse(squares), scale), 0)
        minimum = np.where(at_zero, np.float32(0), minimum)
        rest = codes * scale[..., None] - minimum[..., None] - groups
        error = np.einsum("...i,...i,...i", weights, rest, rest)
        better = (error < best) & (squares > 0)  # equal negative values: the minimum alone gives them
        best[better], scales[better], minima[better] = error[better], scale[better], minimum[better]
    return scales, minima
