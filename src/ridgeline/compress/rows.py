"""Work on parts of the rows of a matrix, on several cores. Parts are small enough for the caches of a core."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np

from ridgeline.ops.arrays import QuantizedMatrix

ROWS = 192  # rows of a part: the result does not depend on the number of threads


def by_rows(num_rows: int, quantize: Callable[[slice], QuantizedMatrix], threads: int | None) -> QuantizedMatrix:
    """Return a matrix whose rows are quantized part by part.

    quantize: returns the codes of some rows; numpy lets other threads run meanwhile. threads: number of threads; None
    for one.
    """
    parts = [slice(start, min(start + ROWS, num_rows)) for start in range(0, num_rows, ROWS)]
    if (threads or 1) == 1 or len(parts) == 1:
        return below(list(map(quantize, parts)))
    with ThreadPoolExecutor(threads) as pool:
        return below(list(pool.map(quantize, parts)))


def below(parts: list[QuantizedMatrix]) -> QuantizedMatrix:
    """Return matrices of one format and order of columns as one matrix, one below the other."""
    joined: dict[str, Any] = {}
    for name in ("codes", "scales", "zero_points"):
        own: list[Any] = [getattr(part, name) for part in parts]
        joined[name] = None if own[0] is None else np.concatenate(own)
    return replace(parts[0], **joined)
