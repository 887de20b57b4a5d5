"""Checks of quantized matrices that come as codes, for backends other than the kernels, which check while they pack."""

from __future__ import annotations

import numpy as np

from ridgeline.ops.api import Memory, QuantizedMatrix
from ridgeline.spec.quant import code_range


def check_codes(matrix: QuantizedMatrix, memory: Memory) -> None:
    """Raise ValueError for codes, scales, offsets or a permutation that the format cannot have."""
    name, (low, high) = matrix.format.name, code_range(matrix.format)
    codes, scales = memory.get(matrix.codes).astype(np.int16), memory.get(matrix.scales)
    is_code = low <= codes.min() and codes.max() <= high
    if matrix.format.numbers == "fp8":
        is_code = is_code and not ((codes & 127) == 127).any()  # NaN
    if not (np.isfinite(scales).all() and is_code):
        raise ValueError(f"a code or a scale is outside of the range of {name}")
    if matrix.zero_points is not None:
        zeros = memory.get(matrix.zero_points)
        if not (low <= zeros.min() and zeros.max() <= high):
            raise ValueError(f"a zero point is outside of the range of {name}: {zeros.min()} to {zeros.max()}")
    if matrix.minimums is not None and not np.isfinite(memory.get(matrix.minimums)).all():
        raise ValueError(f"a minimum of a matrix in {name} is not finite")
    if matrix.permutation is not None:
        columns = np.sort(memory.get(matrix.permutation))
        if not np.array_equal(columns, np.arange(len(columns))):
            raise ValueError(f"the permutation of a matrix in {name} does not contain each column once")
