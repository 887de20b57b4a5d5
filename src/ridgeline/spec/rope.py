"""Rotary position embedding and the ways to stretch it, one type each (arXiv:2104.09864).

The frequencies of two scalings depend on a length as well (regimes.py). Under dynamic NTK a prompt is rotated as a
context of its length, and each later token as a context that ends with that token. Under LongRoPE all tokens of a
sequence are rotated with one set of divisors, which depends on the length of the sequence.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Positions divided by `factor` (arXiv:2306.15595)."""

    factor: float


@dataclass(frozen=True, slots=True)
class DynamicNTKScaling:
    """The base grows with the length beyond `original_max_position_embeddings` (NTK-aware scaling)."""

    factor: float
    original_max_position_embeddings: int

    def theta(self, theta: float, dim: int, length: int) -> float:
        """Return the base for a context of `length` tokens."""
        original = self.original_max_position_embeddings
        length = max(length, original)
        grown: float = (self.factor * length / original - (self.factor - 1)) ** (dim / (dim - 2))
        return theta * grown


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Long wavelengths divided by `factor`, short ones kept, a ramp between (Llama 3.1)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """Interpolation by wavelength with a correction of the attention temperature (arXiv:2309.00071)."""

    factor: float
    original_max_position_embeddings: int
    attention_factor: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True


@dataclass(frozen=True, slots=True)
class LongRopeScaling:
    """A divisor per frequency, one set for short and one for long contexts (arXiv:2402.13753)."""

    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    original_max_position_embeddings: int
    attention_factor: float

    def divisors(self, length: int) -> tuple[float, ...]:
        """Return the divisors for a context of `length` tokens."""
        long = length > self.original_max_position_embeddings
        return self.long_factor if long else self.short_factor


@dataclass(frozen=True, slots=True)
class ProportionalScaling:
    """Only the first `pairs` pairs rotate, with the frequencies of whole heads divided by `factor` (Gemma 4)."""

    pairs: int
    factor: float = 1.0


RopeScaling = LinearScaling | DynamicNTKScaling | Llama3Scaling | YarnScaling | LongRopeScaling | ProportionalScaling


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotation of the first `dim` elements of each query and key head.

    dim: rotated elements per head (even). interleaved: pairs are (2i, 2i+1) instead of (i, i + dim/2). odd: frequencies
    are those of dim - 1 elements, for configs with an odd size, which is rotated as one more. backward: the other way
    round (nanochat).
    """

    dim: int
    theta: float = 10_000.0
    interleaved: bool = False
    scaling: RopeScaling | None = None
    odd: bool = False
    backward: bool = False

    @property
    def period(self) -> int:
        """Return the number of elements over which the frequencies fall from 1 to 1 / theta."""
        return self.dim - self.odd

    @property
    def follows_length(self) -> bool:
        """Return whether its frequencies depend on a length too (regimes.py)."""
        return isinstance(self.scaling, DynamicNTKScaling | LongRopeScaling)

    def __post_init__(self) -> None:
        if self.dim < 2 or self.dim % 2:
            raise ValueError(f"rope dim must be even and at least 2, not {self.dim}")
        if not (self.theta > 0 and math.isfinite(self.theta)):
            raise ValueError(f"rope theta must be positive, not {self.theta}")
        if isinstance(s := self.scaling, ProportionalScaling) and not 0 <= s.pairs <= self.dim // 2:
            raise ValueError(f"{s.pairs} pairs that rotate are not in 0..{self.dim // 2}")
        if isinstance(self.scaling, LongRopeScaling):
            for name in ("short_factor", "long_factor"):
                if (n := len(getattr(self.scaling, name))) != self.dim // 2:
                    raise ValueError(f"rope {name} must have {self.dim // 2} entries, not {n}")
