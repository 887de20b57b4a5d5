"""Means and proportions with their standard errors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ridgeline.sample.logits import Floats

BLOCK_TOKENS = 512  # tokens of a block, whose values are assumed to depend on each other
_Z = 1.959963984540054  # standard deviations around the mean that hold 95 % of a normal distribution


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value and its standard error; None if there is only one block, from which no error can be computed."""

    value: float
    standard_error: float | None

    def scaled(self, factor: float) -> Estimate:
        """Return the estimate times a positive number."""
        error = self.standard_error
        return Estimate(self.value * factor, None if error is None else error * factor)

    def exp(self) -> Estimate:
        """Return e to the value, with the error to first order (delta method); infinite if it exceeds the range of a
        float.
        """
        value = math.exp(self.value) if self.value < 709 else math.inf
        return Estimate(value, None if self.standard_error is None else value * self.standard_error)


@dataclass(frozen=True, slots=True)
class Proportion:
    """A share of independent trials, with Wilson's 95 % interval."""

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, count: int, total: int) -> Proportion:
        """Compute the share and its interval (Wilson, 1927). The trials must be independent."""
        share, square = count / total, _Z**2 / total
        center = (share + square / 2) / (1 + square)
        half = _Z * math.sqrt(share * (1 - share) / total + square / (4 * total)) / (1 + square)
        return cls(share, min(share, max(0.0, center - half)), max(share, min(1.0, center + half)))


def block_mean(values: Floats, lengths: Sequence[int], block_tokens: int = BLOCK_TOKENS) -> Estimate:
    """Return the mean of values [n] and its standard error. Documents have `lengths` [documents] values each.

    Neighboring tokens are not independent, but blocks of them nearly are. Every document is cut into blocks of
    `block_tokens` values, the last one shorter. The error is that of `clustered_mean`.
    """
    ends = np.cumsum(lengths)
    starts = np.concatenate([np.arange(end - n, end, block_tokens) for end, n in zip(ends, lengths, strict=True)])
    sums = np.add.reduceat(np.asarray(values, np.float64), starts)
    return clustered_mean(sums, np.diff(starts, append=len(values)))


def clustered_mean(sums: Floats, counts: np.ndarray[Any, Any]) -> Estimate:
    """Return the mean of values that come in clusters, and its standard error.

    sums, counts [B]: of the values of each cluster. The error is that of a ratio of sums, sum over count (Cochran,
    Sampling Techniques, 1977, section 6.4): sqrt(B / (B - 1) * sum((s - mean * c) ** 2)) / n.
    """
    total, clusters = int(counts.sum()), len(counts)
    mean = float(sums.sum() / total)
    if clusters < 2:
        return Estimate(mean, None)
    residuals = sums - mean * counts
    return Estimate(mean, math.sqrt(clusters / (clusters - 1) * float((residuals**2).sum())) / total)
