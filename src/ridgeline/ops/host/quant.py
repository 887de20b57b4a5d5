"""Quantized matrices and products with rounded tokens, in numpy: the arithmetic of the kernels, to the same bits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ridgeline.ops.api import QuantizedMatrix
from ridgeline.ops.host.memory import Ndarray, widen
from ridgeline.ops.host.primitives import WIDEN_BLOCK
from ridgeline.spec.quant import CODES, Format, Scheme

INT8_STEPS, INT4_STEPS = 127, 7.5  # steps to the largest magnitude
LEAST = 2.0**-100  # a smaller magnitude has no inverse in float32: it counts as zero
EXACT = 512  # products that a float32 adds up without rounding: 512 x 127 x 255 < 2^24


def _int8_scales(peak: Ndarray) -> tuple[Ndarray, Ndarray]:
    scale = np.where(peak > LEAST, peak / np.float32(INT8_STEPS), 0 * peak)  # infinities and NaN stay
    return scale, np.divide(np.float32(INT8_STEPS), peak, out=np.zeros_like(peak), where=peak > LEAST)


def _int4_scales(peak: Ndarray) -> tuple[Ndarray, Ndarray]:
    scale = (peak / np.float32(INT4_STEPS)).astype(np.float16).astype(np.float32)
    return scale, np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale > 0)


# Scheme -> a function from the largest magnitudes of groups to scales and their inverses, both float32.
ROUNDINGS: Mapping[Scheme, Callable[[Ndarray], tuple[Ndarray, Ndarray]]] = {"int8": _int8_scales, "int4": _int4_scales}


def quantize(case: Format) -> Callable[[Ndarray], QuantizedMatrix]:
    def run(weight: Ndarray) -> QuantizedMatrix:
        rows, columns = weight.shape
        codes, scales = np.empty((rows, columns), np.int8), np.empty((rows, case.num_groups(columns)), np.float32)
        step = max(1, WIDEN_BLOCK // columns)
        for start in range(0, rows, step):
            some = slice(start, start + step)
            _round(case, widen(weight[some]), codes[some], scales[some])
        if not np.isfinite(scales).all():
            raise ValueError(f"a weight is not finite, or too large for {case.name}")
        return QuantizedMatrix(case, codes, scales)

    return run


def _round(case: Format, weight: Ndarray, codes: Ndarray, scales: Ndarray) -> None:
    """Write the codes and scales of some rows of a matrix."""
    for g in range(scales.shape[1]):
        part = weight[:, _columns(case, g)]
        scale, inverse = ROUNDINGS[case.scheme](np.abs(part).max(1))
        scales[:, g] = scale
        if np.isfinite(scale).all():
            codes[:, _columns(case, g)] = np.clip(np.rint(part * inverse[:, None]), *CODES[case.scheme])


def dequantize(case: Format) -> Callable[[Any], Ndarray]:
    def run(matrix: Any) -> Ndarray:
        wide = _numbers(case, matrix, slice(None))
        for g in range(matrix.scales.shape[1]):
            wide[:, _columns(case, g)] *= matrix.scales[:, g, None]
        if matrix.permutation is None:
            return wide
        out = np.empty_like(wide)
        out[:, matrix.permutation] = wide
        return out

    return run


def quantized_linear(case: Format) -> Callable[[Ndarray, Any, Ndarray | None], Ndarray]:
    def run(x: Ndarray, matrix: Any, bias: Ndarray | None) -> Ndarray:
        rows, (height, width) = x.reshape(-1, x.shape[-1]), matrix.shape
        if matrix.permutation is not None:
            rows = rows[:, matrix.permutation]
        steps, scale = _tokens(rows)
        out = np.empty((len(rows), height), np.float32)
        block = max(1, WIDEN_BLOCK // width)
        for start in range(0, height, block):
            some = slice(start, start + block)
            out[:, some] = _sums(case, steps, _numbers(case, matrix, some), matrix.scales[some])
        out *= scale
        if bias is not None:
            out += bias
        return out.reshape(*x.shape[:-1], height)

    return run


def _numbers(case: Format, matrix: Any, rows: slice) -> Ndarray:
    """Return rows of the codes without their zero points, in float32: whole numbers."""
    wide: Ndarray = matrix.codes[rows].astype(np.float32)
    if matrix.zero_points is not None:
        for g in range(matrix.zero_points.shape[1]):
            wide[:, _columns(case, g)] -= matrix.zero_points[rows, g, None]
    return wide


def _tokens(x: Ndarray) -> tuple[Ndarray, Ndarray]:
    """Return x [T, in] as whole numbers of at most 127, and the scale of each token [T, 1]."""
    peak = np.maximum(np.abs(x).max(1, keepdims=True, initial=0.0), np.float32(LEAST))
    steps = np.rint(x * (np.float32(127) / peak))
    is_finite = np.isfinite(peak)
    return np.where(is_finite, steps, np.float32(0)), np.where(is_finite, peak / np.float32(127), np.float32(np.nan))


def _sums(case: Format, steps: Ndarray, numbers: Ndarray, scales: Ndarray) -> Ndarray:
    """Return steps @ (numbers x scales).T, in which sums of whole numbers are exact."""
    if case.group:
        total = np.zeros((len(steps), len(numbers)), np.float32)
        for g in range(scales.shape[1]):
            some = _columns(case, g)
            total += (steps[:, some] @ numbers[:, some].T) * scales[:, g]
        return total
    exact = np.zeros((len(steps), len(numbers)))
    for start in range(0, numbers.shape[1], EXACT):
        some = slice(start, start + EXACT)
        exact += steps[:, some] @ numbers[:, some].T
    wide: Ndarray = exact.astype(np.float32) * scales[:, 0]
    return wide


def _columns(case: Format, group: int) -> slice:
    """Return the columns that share the scale of a group."""
    return slice(group * case.group, (group + 1) * case.group) if case.group else slice(None)
