"""Matrices rounded to nearest, and products of tokens that are rounded too: what the kernels compute, in numpy."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ridgeline.ops.host.memory import Ndarray, widen
from ridgeline.ops.host.primitives import WIDEN_BLOCK
from ridgeline.spec.quant import Format

INT8_STEPS, INT4_STEPS = 127, 7.5  # to the largest magnitude
LEAST = 2.0**-100  # a magnitude below has no inverse: it counts as zero
EXACT = 1024  # products of two bytes that a float32 adds up without rounding: 1024 x 127^2 < 2^24


def quantize(case: Format) -> Callable[[Ndarray], tuple[Ndarray, Ndarray]]:
    def run(weight: Ndarray) -> tuple[Ndarray, Ndarray]:
        rows, columns = weight.shape
        group = case.group or columns
        codes, scales = np.empty((rows, columns), np.int8), np.empty((rows, -(-columns // group)), np.float32)
        step = max(1, WIDEN_BLOCK // columns)
        for start in range(0, rows, step):
            some = slice(start, start + step)
            _round(case, widen(weight[some]), group, codes[some], scales[some])
        if not np.isfinite(scales).all():
            raise ValueError(f"a weight is not finite, or too large for {case.name}")
        return codes, scales

    return run


def _round(case: Format, weight: Ndarray, group: int, codes: Ndarray, scales: Ndarray) -> None:
    """Rows of a matrix, into codes and scales."""
    for g in range(scales.shape[1]):
        part = weight[:, g * group : (g + 1) * group]
        peak = np.abs(part).max(1)
        if case.bits == 8:
            scale = np.where(peak > LEAST, peak / np.float32(INT8_STEPS), 0 * peak)  # an infinity or a NaN stays
            inverse = np.divide(np.float32(INT8_STEPS), peak, out=np.zeros_like(peak), where=peak > LEAST)
            low, high = -127, 127
        else:
            scale = (peak / np.float32(INT4_STEPS)).astype(np.float16).astype(np.float32)
            inverse = np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale > 0)
            low, high = -8, 7
        scales[:, g] = scale
        if np.isfinite(scale).all():
            codes[:, g * group : (g + 1) * group] = np.clip(np.rint(part * inverse[:, None]), low, high)


def dequantize(case: Format) -> Callable[[Ndarray, Ndarray], Ndarray]:
    def run(codes: Ndarray, scales: Ndarray) -> Ndarray:
        wide: Ndarray = codes.astype(np.float32)
        for g in range(scales.shape[1]):
            wide[:, _columns(case, g)] *= scales[:, g, None]
        return wide

    return run


def quantized_linear(case: Format) -> Callable[[Ndarray, Ndarray, Ndarray, Ndarray | None], Ndarray]:
    def run(x: Ndarray, codes: Ndarray, scales: Ndarray, bias: Ndarray | None) -> Ndarray:
        rows = x.reshape(-1, x.shape[-1])
        steps, scale = _tokens(rows)
        out = np.empty((len(rows), len(codes)), np.float32)
        block = max(1, WIDEN_BLOCK // codes.shape[1])
        for start in range(0, len(codes), block):
            some = slice(start, start + block)
            out[:, some] = _sums(case, steps, codes[some].astype(np.float32), scales[some])
        out *= scale
        if bias is not None:
            out += bias
        return out.reshape(*x.shape[:-1], len(codes))

    return run


def _tokens(x: Ndarray) -> tuple[Ndarray, Ndarray]:
    """x [T, in] as whole numbers up to 127, and what each token's are multiplied by, [T, 1]."""
    peak = np.maximum(np.abs(x).max(1, keepdims=True, initial=0.0), np.float32(LEAST))
    steps = np.rint(x * (np.float32(127) / peak))
    is_finite = np.isfinite(peak)
    return np.where(is_finite, steps, np.float32(0)), np.where(is_finite, peak / np.float32(127), np.float32(np.nan))


def _sums(case: Format, steps: Ndarray, codes: Ndarray, scales: Ndarray) -> Ndarray:
    """steps @ (codes x scales).T: whole numbers are added up exactly."""
    if case.group:
        total = np.zeros((len(steps), len(codes)), np.float32)
        for g in range(scales.shape[1]):
            some = _columns(case, g)
            total += (steps[:, some] @ codes[:, some].T) * scales[:, g]
        return total
    exact = np.zeros((len(steps), len(codes)))
    for start in range(0, codes.shape[1], EXACT):
        some = slice(start, start + EXACT)
        exact += steps[:, some] @ codes[:, some].T
    wide: Ndarray = exact.astype(np.float32) * scales[:, 0]
    return wide


def _columns(case: Format, group: int) -> slice:
    """Those that have a group's scale."""
    return slice(group * case.group, (group + 1) * case.group) if case.group else slice(None)
