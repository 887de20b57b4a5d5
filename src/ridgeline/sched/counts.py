"""Counts of values, for reports and metrics: plain numbers, which pickle."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from copy import copy
from typing import Self


class Histogram:
    """Counts values by upper bound. `observe` takes a binary search over the bounds."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def plus(self, other: Self) -> Self:
        """Return the counts of both. The bounds must be equal."""
        if self.bounds != other.bounds:
            raise ValueError("histograms with different bounds cannot be added")
        both = copy(self)
        both.counts = [a + b for a, b in zip(self.counts, other.counts, strict=True)]
        both.sum = self.sum + other.sum
        return both
