"""Checks of quantized matrices that come as codes, for backends other than the kernels, which check while they pack."""

from __future__ import annotations

import numpy as np

from ridgeline.ops.api import Memory, QuantizedMatrix
from ridgeline.spec.quant import CODES


def check_codes(matrix: QuantizedMatrix, memory: Memory) -> None:
    """Raise ValueError for codes, scales or a permutation that the format cannot have."""
    name, (low, high) = matrix.format.name, CODES[matrix.format.scheme]
    codes, scales = memory.get(matrix.codes), memory.get(matrix.scales)
    if not (np.isfinite(scales).all() and (scales >= 0).all() and low <= codes.min() and codes.max() <= high):
        raise ValueError(f"a code or a scale is outside of the range of {name}")
    if matrix.permutation is not None:
        columns = np.sort(memory.get(matrix.permutation))
        if not np.array_equal(columns, np.arange(len(columns))):
            raise ValueError(f"the permutation of a matrix in {name} does not contain each column once")
