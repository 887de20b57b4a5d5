"""A few numbers for many."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

import numpy as np


@dataclass(frozen=True, slots=True)
class Spread:
    """Mean and percentiles of measured values, in their unit; percentiles between two values are interpolated."""

    mean: float
    median: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Self | None:
        """Return the spread of the values; None if there are none."""
        found = [*values]
        return cls(float(np.mean(found)), *map(float, np.percentile(found, [50, 90, 99]))) if found else None
