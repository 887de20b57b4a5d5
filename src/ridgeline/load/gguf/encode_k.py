"""Quantize blocks of 256 weights to Q4_K and Q6_K: search the scales that minimize the squared error.

A group's scale is tried at several sizes around the one that maps its range onto all codes. For the codes that each
size gives, the best scale (and minimum) follows by least squares; the size with the least error is kept. The scales of
a block are then rounded to whole numbers times one float16, and the codes are chosen again for the rounded scales.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ridgeline.load.gguf.codes import Bytes, Floats, gather

# Sizes that are tried: steps of 0.1 codes around the full range.
_SYMMETRIC = np.arange(-9, 10) * np.float32(0.1)
_WITH_MINIMUM = np.arange(-10, 11) * np.float32(0.1)


def half(x: np.ndarray[Any, Any]) -> Bytes:
    """Return numbers as the bytes of float16. Raises ValueError if one is too large."""
    with np.errstate(over="ignore"):
        rounded = x.astype("<f2")
    if not np.isfinite(rounded).all():
        raise ValueError(f"has a number or a scale of {float(np.abs(x).max()):g}, but float16 only reaches 65504")
    return rounded.view(np.uint8)


def q6_k(x: Floats) -> Bytes:
    """Return the bytes [blocks, 210] of blocks [blocks, 256]: 16 groups with scales of 8 bits, codes from -32 to 31."""
    groups = x.reshape(len(x), 16, 16)
    scales = _symmetric_scales(groups, 32)
    largest = np.take_along_axis(scales, np.abs(scales).argmax(axis=1, keepdims=True), axis=1)
    d = half(largest / np.float32(-128))
    step = d.view("<f2").astype(np.float32)
    factors = np.rint(scales * inverse(step)).clip(-128, 127)
    codes = np.rint(groups * inverse(step * factors)[..., None]).clip(-32, 31)
    fields = (codes + 32).astype(np.uint8).reshape(len(x), 256)
    low, high = gather(fields & 15, 64, 4), gather(fields >> 4, 32, 2)
    return np.concatenate([low, high, factors.astype(np.int8).view(np.uint8), d], axis=1)


def q4_k(x: Floats) -> Bytes:
    """Return the bytes [blocks, 144] of blocks [blocks, 256]: 8 groups, scales and minima of 6 bits, codes 0 to 15."""
    groups = x.reshape(len(x), 8, 32)
    scales, minima = _scales_and_minima(groups, 15)
    d, dmin = (half(v.max(axis=1, keepdims=True) / np.float32(63)) for v in (scales, minima))
    step, min_step = (v.view("<f2").astype(np.float32) for v in (d, dmin))
    factors = np.rint(scales * inverse(step)).clip(0, 63)
    min_factors = np.rint(minima * inverse(min_step)).clip(0, 63)
    above = groups + (min_step * min_factors)[..., None]
    codes = np.rint(above * inverse(step * factors)[..., None]).clip(0, 15).astype(np.uint8)
    packed = _six_bits(factors.astype(np.uint8), min_factors.astype(np.uint8))
    return np.concatenate([d, dmin, packed, gather(codes.reshape(len(x), 256), 32, 4)], axis=1)


def inverse(x: Floats) -> Floats:
    """Return 1 / x, and 0 for 0."""
    return np.divide(np.float32(1), x, out=np.zeros_like(x), where=x != 0)


def _symmetric_scales(groups: Floats, most: int) -> Floats:
    """Return the scale of each group [..., weights] for codes from -most to most - 1."""
    largest = np.take_along_axis(groups, np.abs(groups).argmax(axis=-1, keepdims=True), axis=-1)
    best, scales = np.zeros(groups.shape[:-1], np.float32), np.zeros(groups.shape[:-1], np.float32)
    for change in _SYMMETRIC:
        codes = np.rint(groups * (-(most + change) * inverse(largest))).clip(-most, most - 1)
        both, squares = np.einsum("...i,...i", groups, codes), np.einsum("...i,...i", codes, codes)
        scale = both * inverse(squares)
        gain = both * scale  # by which this scale lowers the sum of squared errors below that of zeros
        better = gain > best
        best[better], scales[better] = gain[better], scale[better]
    return scales


def _scales_and_minima(groups: Floats, most: int) -> tuple[Floats, Floats]:
    """Return scales and minima of groups [..., weights], neither negative, for codes from 0 to most."""
    low = np.minimum(groups.min(axis=-1, keepdims=True), 0)
    spread = groups.max(axis=-1, keepdims=True) - low
    count, total = np.float32(groups.shape[-1]), groups.sum(axis=-1)
    scales, minima = spread[..., 0] / np.float32(most), -low[..., 0]
    best = np.full(groups.shape[:-1], np.inf, np.float32)
    for change in _WITH_MINIMUM:
        codes = np.rint((groups - low) * ((most + change) * inverse(spread))).clip(0, most)
        ones, squares = codes.sum(axis=-1), np.einsum("...i,...i", codes, codes)
        both = np.einsum("...i,...i", groups, codes)
        divisor = count * squares - ones * ones
        scale = (count * both - total * ones) * inverse(divisor)
        minimum = (ones * both - squares * total) * inverse(divisor)
        at_zero = (minimum < 0) | (divisor <= 0)  # the best minimum is none
        scale = np.maximum(np.where(at_zero, both * inverse(squares), scale), 0)
        minimum = np.where(at_zero, np.float32(0), minimum)
        rest = codes * scale[..., None] - minimum[..., None] - groups
        error = np.einsum("...i,...i", rest, rest)
        better = (error < best) & (squares > 0)  # equal negative values: the minimum alone gives them
        best[better], scales[better], minima[better] = error[better], scale[better], minimum[better]
    return scales, minima


def _six_bits(scales: Bytes, minima: Bytes) -> Bytes:
    """Return the 12 bytes that `codes.six_bits` reads."""
    low = scales[:, :4] | scales[:, 4:] >> 4 << 6
    middle = minima[:, :4] | minima[:, 4:] >> 4 << 6
    return np.concatenate([low, middle, scales[:, 4:] & 15 | (minima[:, 4:] & 15) << 4], axis=1)
