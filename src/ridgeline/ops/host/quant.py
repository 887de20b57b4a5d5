"""Quantized matrices and their products in numpy: the arithmetic of the kernels, to the same bits for whole numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from ml_dtypes import bfloat16

from ridgeline.ops.api import QuantizedMatrix
from ridgeline.ops.host.memory import Ndarray, widen
from ridgeline.ops.host.primitives import WIDEN_BLOCK
from ridgeline.ops.host.stored import FP8_MOST, to_fp8
from ridgeline.spec.quant import NUMBERS, OUTLIER, Format

LEAST = 2.0**-100  # a smaller magnitude has no inverse in float32: it counts as zero
EXACT = 512  # products that a float32 adds up without rounding: 512 x 127 x 255 < 2^24


def quantize(case: Format) -> Callable[[Ndarray], QuantizedMatrix]:
    def run(weight: Ndarray) -> QuantizedMatrix:
        if case.offsets == "minimums" or (NUMBERS[case.numbers].levels and case.numbers != "fp8"):
            raise ValueError(f"nothing is rounded to {case.name} here: such matrices come from checkpoints")
        rows, columns = weight.shape
        groups = rows, case.num_groups(columns)
        codes = np.empty((rows, columns), np.uint8 if NUMBERS[case.numbers].levels else np.int8)
        scales = np.empty(groups, np.float32)
        zero_points = np.zeros(groups, np.int8) if case.offsets == "zero_points" else None
        for some in _shared_rows(case, rows, columns):
            zeros = None if zero_points is None else zero_points[some]
            with np.errstate(all="ignore"):  # infinities and NaN are found below
                _round(case, widen(weight[some]), codes[some], scales[some], zeros)
        if not np.isfinite(scales).all():
            raise ValueError(f"a weight is not finite, or too large for {case.name}")
        return QuantizedMatrix(case, codes, scales, zero_points)

    return run


def _shared_rows(case: Format, rows: int, columns: int) -> Iterator[slice]:
    """Yield ranges of rows that are rounded at once: those that share scales, or a block that stays in the cache."""
    step = rows if case.rows == 0 else case.rows if case.rows > 1 else max(1, WIDEN_BLOCK // columns)
    for start in range(0, rows, max(1, step)):
        yield slice(start, start + step)


def _round(case: Format, weight: Ndarray, codes: Ndarray, scales: Ndarray, zero_points: Ndarray | None) -> None:
    """Write the codes, scales and zero points of some rows of a matrix."""
    numbers = NUMBERS[case.numbers]
    for g in range(scales.shape[1]):
        part = weight[:, _columns(case, g)]
        if zero_points is not None:
            scale, inverse, zero = _asymmetric(case, part)
            zero_points[:, g] = zero
        else:
            scale, inverse = _symmetric(case, _peak(case, part))
            zero = np.zeros_like(scale)
        scales[:, g] = scale
        if not np.isfinite(scale).all():
            return
        steps = part * inverse[:, None]
        if numbers.levels:
            codes[:, _columns(case, g)] = to_fp8(steps)
        else:
            least = -numbers.high if case.numbers == "int8" and zero_points is None else numbers.low
            codes[:, _columns(case, g)] = np.clip(np.rint(steps) + zero[:, None], least, numbers.high)


def _peak(case: Format, part: Ndarray) -> Ndarray:
    """Return the largest magnitude for each row, over all rows that share a scale."""
    peak: Ndarray = np.abs(part).max(1)
    return peak if case.rows == 1 else np.full_like(peak, peak.max())


def _symmetric(case: Format, peak: Ndarray) -> tuple[Ndarray, Ndarray]:
    """Return scales and their inverses, float32, for groups with these largest magnitudes."""
    steps = np.float32(NUMBERS[case.numbers].steps)
    if case.scale_bits == 16:
        return _half(peak / steps)
    scale = np.where(peak > LEAST, peak / steps, 0 * peak)  # infinities and NaN stay
    return scale, np.divide(steps, peak, out=np.zeros_like(peak), where=peak > LEAST)


def _asymmetric(case: Format, part: Ndarray) -> tuple[Ndarray, Ndarray, Ndarray]:
    """Return scales, their inverses and zero points for the groups of some rows. The range always contains 0."""
    numbers = NUMBERS[case.numbers]
    low, high = np.minimum(part.min(1), 0), np.maximum(part.max(1), 0)
    low, high = np.where(np.isnan(part).any(1), np.nan, low), np.where(np.isnan(part).any(1), np.nan, high)
    wide = ((high - low) / np.float32(numbers.high - numbers.low)).astype(np.float32)
    if case.scale_bits == 16:
        scale, inverse = _half(wide)
    else:
        scale = np.where(wide > LEAST, wide, 0 * wide)
        inverse = np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale > LEAST)
    zero = np.clip(np.rint(numbers.low - low * inverse), numbers.low, numbers.high)
    return scale, inverse, np.where(np.isfinite(scale), zero, 0).astype(np.float32)


def _half(scale: Ndarray) -> tuple[Ndarray, Ndarray]:
    """Return scales rounded to float16, and their inverses."""
    scale = scale.astype(np.float16).astype(np.float32)
    return scale, np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale > 0)


def dequantize(case: Format) -> Callable[[Any], Ndarray]:
    def run(matrix: Any) -> Ndarray:
        wide = _dense(case, matrix, slice(None))
        if matrix.permutation is None:
            return wide
        out = np.empty_like(wide)
        out[:, matrix.permutation] = wide
        return out

    return run


def rows(matrix: Any, ids: Ndarray) -> Ndarray:
    """Return some rows of a matrix, float32."""
    return dequantize(matrix.format)(matrix.rows(ids))


def quantized_linear(case: Format) -> Callable[[Ndarray, Any, Ndarray | None], Ndarray]:
    ways = {"exact": _exact, "bf16": _bf16, "fp8": _fp8, "int8": _int8, "outliers": _outliers}
    multiply = ways[case.activations]

    def run(x: Ndarray, matrix: Any, bias: Ndarray | None) -> Ndarray:
        rows = x.reshape(-1, x.shape[-1])
        if matrix.permutation is not None:
            rows = rows[:, matrix.permutation]
        out = multiply(case, rows, matrix)
        if bias is not None:
            out += bias
        return out.reshape(*x.shape[:-1], matrix.shape[0])

    return run


def _blocks(matrix: Any) -> Iterator[slice]:
    """Yield ranges of rows whose numbers stay in the cache as floats."""
    height, width = matrix.shape
    block = max(1, WIDEN_BLOCK // width)
    for start in range(0, height, block):
        yield slice(start, start + block)


def _exact(case: Format, x: Ndarray, matrix: Any) -> Ndarray:
    out = np.empty((len(x), matrix.shape[0]), np.float32)
    for some in _blocks(matrix):
        np.matmul(x, _dense(case, matrix, some).T, out=out[:, some])
    return out


def round_bf16(x: Ndarray) -> Ndarray:
    with np.errstate(all="ignore"):
        rounded: Ndarray = x.astype(bfloat16).astype(x.dtype)
    return rounded


def _bf16(case: Format, x: Ndarray, matrix: Any) -> Ndarray:
    return _exact(case, round_bf16(x), matrix)


def _fp8(case: Format, x: Ndarray, matrix: Any) -> Ndarray:
    """Round each token to e4m3, with its largest magnitude as 448, and multiply the rounded numbers."""
    scale = _token_scales(x, FP8_MOST, matrix.input_scale)
    with np.errstate(invalid="ignore"):
        codes = to_fp8(np.clip(x / scale, -FP8_MOST, FP8_MOST))
    rounded = np.array(NUMBERS["fp8"].levels, np.float32)[codes] * scale
    return _exact(case, rounded, matrix)


def _int8(case: Format, x: Ndarray, matrix: Any) -> Ndarray:
    """Round each token to 255 steps; sums of whole numbers are exact."""
    steps, scale = _tokens(x, matrix.input_scale)
    out = np.empty((len(x), matrix.shape[0]), np.float32)
    for some in _blocks(matrix):
        if case.block:
            out[:, some] = _sums_of_blocks(case, steps, matrix, some)
            continue
        out[:, some] = _sums(case, steps, _numbers(case, matrix, some), matrix.scales[some])
        if matrix.minimums is not None:
            out[:, some] -= _group_sums(case, steps) @ matrix.minimums[some].T
    out *= scale
    return out


def _outliers(case: Format, x: Ndarray, matrix: Any) -> Ndarray:
    """Multiply magnitudes of at least OUTLIER in float32, and the others as `_int8` does."""
    large = (np.abs(x) >= OUTLIER) & np.isfinite(x).all(1, keepdims=True)
    out = _int8(case, np.where(large, np.float32(0), x), matrix)
    columns = np.flatnonzero(large.any(0))
    if len(columns):
        kept = np.where(large[:, columns], x[:, columns], np.float32(0))
        for some in _blocks(matrix):
            out[:, some] += kept @ _dense(case, matrix, some)[:, columns].T
    return out


def _dense(case: Format, matrix: Any, rows: slice) -> Ndarray:
    """Return rows of the matrix in the order of its codes, float32."""
    wide = _numbers(case, matrix, rows)
    scales = of_groups(case, matrix.scales[rows], _part(matrix.factors, rows))
    minimums = None
    if matrix.minimums is not None:
        minimums = of_groups(case, matrix.minimums[rows], _part(matrix.min_factors, rows))
    for g in range(scales.shape[1]):
        wide[:, _columns(case, g)] *= scales[:, g, None]
        if minimums is not None:
            wide[:, _columns(case, g)] -= minimums[:, g, None]
    return wide


def of_groups(case: Format, numbers: Ndarray, factors: Ndarray | None) -> Ndarray:
    """Return the scales or minimums of groups, float32 [rows, groups], from those of groups, or of blocks with factors.

    A float16 number times 8 bits is a float32 number, so that nothing is rounded.
    """
    if factors is None:
        return numbers
    of_blocks = np.repeat(numbers, case.block // case.group, axis=1)[:, : factors.shape[1]]
    return of_blocks * factors.astype(np.float32)


def _part(array: Ndarray | None, rows: slice) -> Ndarray | None:
    return None if array is None else array[rows]


def _numbers(case: Format, matrix: Any, rows: slice) -> Ndarray:
    """Return the numbers of rows of codes, without their zero points, in float32."""
    levels = NUMBERS[case.numbers].levels
    if levels:
        found: Ndarray = np.array(levels, np.float32)[matrix.codes[rows]]
        return found
    wide: Ndarray = matrix.codes[rows].astype(np.float32)
    if matrix.zero_points is not None:
        for g in range(matrix.zero_points.shape[1]):
            wide[:, _columns(case, g)] -= matrix.zero_points[rows, g, None]
    return wide


def _token_scales(x: Ndarray, steps: int, given: float | None) -> Ndarray:
    """Return the scale of each token [T, 1]: that of its matrix where it has one, NaN if the token is not finite."""
    peak = np.maximum(np.abs(x).max(1, keepdims=True, initial=0.0), np.float32(LEAST))
    scale = peak / np.float32(steps) if given is None else np.full_like(peak, given)
    return np.where(np.isfinite(peak), scale, np.float32(np.nan))


def _tokens(x: Ndarray, given: float | None) -> tuple[Ndarray, Ndarray]:
    """Return x [T, in] as whole numbers of at most 127, and the scale of each token [T, 1]."""
    scale = _token_scales(x, 127, given)
    peak = np.maximum(np.abs(x).max(1, keepdims=True, initial=0.0), np.float32(LEAST))
    inverse = np.float32(127) / peak if given is None else np.float32(1) / np.full_like(peak, given)
    with np.errstate(invalid="ignore"):
        steps = np.clip(np.rint(x * inverse), -127, 127)
    return np.where(np.isfinite(peak), steps, np.float32(0)), scale


def _group_sums(case: Format, steps: Ndarray) -> Ndarray:
    """Return the sum of each group of whole numbers [T, in] -> [T, groups]."""
    starts = np.arange(0, steps.shape[1], case.group) if case.group else np.zeros(1, np.int64)
    sums: Ndarray = np.add.reduceat(steps, starts, axis=1)
    return sums


def _sums(case: Format, steps: Ndarray, numbers: Ndarray, scales: Ndarray) -> Ndarray:
    """Return steps @ (numbers x scales).T, in which sums of whole numbers are exact."""
    if case.group:
        total = np.zeros((len(steps), len(numbers)), np.float32)
        for g in range(scales.shape[1]):
            some = _columns(case, g)
            total += _whole_sums(steps[:, some], numbers[:, some]) * scales[:, g]
        return total
    return _whole_sums(steps, numbers) * scales[:, 0]


def _sums_of_blocks(case: Format, steps: Ndarray, matrix: Any, some: slice) -> Ndarray:
    """Return steps @ rows.T for scales of blocks. The sums over a block are of whole numbers, and exact."""
    wide = steps.astype(np.float64)
    group = np.arange(steps.shape[1]) // case.group
    numbers = _numbers(case, matrix, some) * matrix.factors[some].astype(np.float64)[:, group]
    total = np.zeros((len(steps), len(numbers)), np.float32)
    for b in range(matrix.scales.shape[1]):
        columns = slice(b * case.block, (b + 1) * case.block)
        total += (wide[:, columns] @ numbers[:, columns].T).astype(np.float32) * matrix.scales[some, b]
        if matrix.minimums is not None:
            lower = matrix.min_factors[some].astype(np.float64)[:, group[columns]]
            total -= (wide[:, columns] @ lower.T).astype(np.float32) * matrix.minimums[some, b]
    return total


def _whole_sums(steps: Ndarray, numbers: Ndarray) -> Ndarray:
    """Return steps @ numbers.T, rounded once to float32."""
    if steps.shape[1] <= EXACT:
        return steps @ numbers.T
    exact = np.zeros((len(steps), len(numbers)))
    for start in range(0, numbers.shape[1], EXACT):
        some = slice(start, start + EXACT)
        exact += steps[:, some] @ numbers[:, some].T
    return exact.astype(np.float32)


def _columns(case: Format, group: int) -> slice:
    """Return the columns that share the scale of a group."""
    return slice(group * case.group, (group + 1) * case.group) if case.group else slice(None)
