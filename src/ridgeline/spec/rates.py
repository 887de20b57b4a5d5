"""Store the measured rates of a machine: seconds as functions of the amount of work."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import exp, isfinite, log


@dataclass(frozen=True, slots=True)
class Curve:
    """A positive function, measured at ascending points: linear between them in logarithms, constant outside."""

    points: tuple[float, ...]
    values: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.points or len(self.points) != len(self.values):
            raise ValueError(f"{len(self.points)} points and {len(self.values)} values; as many of both are needed")
        if any(a >= b for a, b in zip(self.points, self.points[1:], strict=False)):
            raise ValueError("the points of a curve must ascend")
        if not all(isfinite(v) and v > 0 for v in (*self.points, *self.values)):
            raise ValueError("points and values of a curve must be positive")

    def at(self, point: float) -> float:
        if point <= self.points[0]:
            return self.values[0]
        if point >= self.points[-1]:
            return self.values[-1]
        i = bisect_right(self.points, point)
        low, high = self.points[i - 1], self.points[i]
        share = log(point / low) / log(high / low)
        return exp((1 - share) * log(self.values[i - 1]) + share * log(self.values[i]))


def least(a: Curve, b: Curve) -> Curve:
    """Return the lesser of two curves over the same points."""
    if a.points != b.points:
        raise ValueError(f"the points of two curves must be the same, not {a.points} and {b.points}")
    return Curve(a.points, tuple(map(min, a.values, b.values)))


@dataclass(frozen=True, slots=True)
class Passes:
    """Measured times of products of rows of activations with stored numbers: a weight matrix, or keys and values.

    near, far: seconds for each stored number and row, by the number of rows. near: the numbers are in the caches of
    the processor. far: they are in memory.
    """

    near: Curve
    far: Curve

    def seconds(self, numbers: float, rows: float, far: float) -> float:
        """Return the seconds of a pass. It never falls with more rows or numbers. far: share of numbers from memory."""
        one = (1 - far) * self.near.at(rows) + far * self.far.at(rows)
        return numbers * rows * one


@dataclass(frozen=True, slots=True)
class Rates:
    """Measured rates of one machine with one number of threads.

    Args:
        isa: Instruction set of the kernels.
        read, copy: Bytes per second by bytes in use, for each number of threads.
        far: Share of the bytes read in a step that come from memory, by the number of bytes.
        products, attention: Times of passes by the type of the stored numbers.
        terms: Seconds of one unit of each term (cost/calibrated.py).
    """

    threads: int
    isa: str
    read: Mapping[str, Curve]
    copy: Mapping[str, Curve]
    far: Curve
    products: Mapping[str, Passes]
    attention: Mapping[str, Passes]
    terms: Mapping[str, float] = field(default_factory=dict)
