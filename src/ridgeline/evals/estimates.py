"""Means and proportions with their errors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ridgeline.sample.logits import Floats

BLOCK_TOKENS = 512  # neighbors whose values are taken to depend on each other
_Z = 1.959963984540054  # 95 % of a normal distribution lies within so many standard deviations


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value and its standard error; None where one block is all there is, which says nothing of the spread."""

    value: float
    standard_error: float | None

    def scaled(self, factor: float) -> Estimate:
        """The estimate times a positive number."""
        error = self.standard_error
        return Estimate(self.value * factor, None if error is None else error * factor)

    def exp(self) -> Estimate:
        """e to the value, to first order in the error (the delta method); infinite where no float is so large."""
        value = math.exp(self.value) if self.value < 709 else math.inf
        return Estimate(value, None if self.standard_error is None else value * self.standard_error)


@dataclass(frozen=True, slots=True)
class Proportion:
    """A share of so many trials, with Wilson's interval that holds the true one in 95 % of cases."""

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, count: int, total: int) -> Proportion:
        """Wilson (1927), for independent trials."""
        share, square = count / total, _Z**2 / total
        center = (share + square / 2) / (1 + square)
        half = _Z * math.sqrt(share * (1 - share) / total + square / (4 * total)) / (1 + square)
        return cls(share, min(share, max(0.0, center - half)), max(share, min(1.0, center + half)))


def block_mean(values: Floats, lengths: Sequence[int], block_tokens: int = BLOCK_TOKENS) -> Estimate:
    """The mean of values [n] of documents with `lengths` [documents] values each, and its standard error.

    Neighboring tokens are not independent; blocks of them nearly are. Every document is cut into runs of
    `block_tokens` values, the last one shorter. The error is that of a ratio of sums over clusters, sum over count
    (Cochran, Sampling Techniques, 1977, section 6.4): with B blocks, each with the sum s and the count c,
    sqrt(B / (B - 1) * sum((s - mean * c) ** 2)) / n.
    """
    mean = float(values.mean())
    ends = np.cumsum(lengths)
    starts = np.concatenate([np.arange(end - n, end, block_tokens) for end, n in zip(ends, lengths, strict=True)])
    blocks = len(starts)
    if blocks < 2:
        return Estimate(mean, None)
    counts = np.diff(starts, append=len(values))
    residuals = np.add.reduceat(values, starts) - mean * counts
    return Estimate(mean, math.sqrt(blocks / (blocks - 1) * float((residuals**2).sum())) / len(values))
