"""What a machine was measured to do: seconds, as functions of how much there is to do."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import exp, isfinite, log


@dataclass(frozen=True, slots=True)
class Curve:
    """A positive function that was measured at ascending places: straight between them in logarithms, flat beyond."""

    places: tuple[float, ...]
    values: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.places or len(self.places) != len(self.values):
            raise ValueError(f"{len(self.places)} places and {len(self.values)} values; as many of both are needed")
        if any(a >= b for a, b in zip(self.places, self.places[1:], strict=False)):
            raise ValueError("the places of a curve must ascend")
        if not all(isfinite(v) and v > 0 for v in (*self.places, *self.values)):
            raise ValueError("places and values of a curve must be positive")

    def at(self, place: float) -> float:
        if place <= self.places[0]:
            return self.values[0]
        if place >= self.places[-1]:
            return self.values[-1]
        i = bisect_right(self.places, place)
        low, high = self.places[i - 1], self.places[i]
        share = log(place / low) / log(high / low)
        return exp((1 - share) * log(self.values[i - 1]) + share * log(self.values[i]))


def least(a: Curve, b: Curve) -> Curve:
    """The lesser of two curves over the same places."""
    if a.places != b.places:
        raise ValueError(f"the places of two curves must be the same, not {a.places} and {b.places}")
    return Curve(a.places, tuple(map(min, a.values, b.values)))


@dataclass(frozen=True, slots=True)
class Passes:
    """Rows of activations that meet numbers which lie in memory: a matrix, or keys and values.

    Seconds of a number and a row, by the number of rows. near: the numbers lie in caches. far: they come from memory.
    """

    near: Curve
    far: Curve

    def seconds(self, numbers: float, rows: float, far: float) -> float:
        """far: the share of the numbers that comes from memory. Never less with more rows or numbers."""
        one = (1 - far) * self.near.at(rows) + far * self.far.at(rows)
        return numbers * rows * one


@dataclass(frozen=True, slots=True)
class Rates:
    """One machine with one number of threads.

    read, copy: bytes per second by bytes in use, for each number of threads. far: the share of what a step reads that
    comes from memory, by the bytes that it reads. products, attention: by the type in which numbers are stored. terms:
    seconds of one of each thing that a step does besides (cost/calibrated.py). isa: the kernels' instruction set.
    """

    threads: int
    isa: str
    read: Mapping[str, Curve]
    copy: Mapping[str, Curve]
    far: Curve
    products: Mapping[str, Passes]
    attention: Mapping[str, Passes]
    terms: Mapping[str, float] = field(default_factory=dict)
