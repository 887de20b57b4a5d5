"""Rotation frequencies in float32, in the order of operations that models were trained with."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ridgeline.spec import (
    DynamicNTKScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    ProportionalScaling,
    Regimes,
    Rope,
    YarnScaling,
)

Floats = np.ndarray[Any, np.dtype[np.float32]]
Ints = np.ndarray[Any, np.dtype[np.int64]]
BLOCK = 4096  # lengths whose frequencies are computed at once, in float64


class FrequencyTables:
    """The frequencies of each regime of a model whose rotations depend on the length of a sequence.

    regimes: the lengths at which frequencies change.
    """

    def __init__(self, regimes: Regimes) -> None:
        self.regimes = regimes
        self._breaks = np.array(regimes.breaks, np.int64)

    def table(self, rope: Rope) -> tuple[Floats, float]:
        """Return frequencies [regimes, dim / 2] of such a rotation, and the factor on cosines and sines."""
        contexts = self.regimes.contexts()
        match rope.scaling:
            case LongRopeScaling(original_max_position_embeddings=original):
                (short, factor), (long, _) = (frequencies(rope, length) for length in (original, original + 1))
                return np.where(np.array(contexts)[:, None] > original, long, short), factor
            case DynamicNTKScaling() as s:
                found = np.empty((len(contexts), rope.dim // 2), np.float32)
                for start in range(0, len(contexts), BLOCK):
                    bases = [s.theta(rope.theta, rope.period, n) for n in contexts[start : start + BLOCK]]
                    found[start : start + BLOCK] = _inverse(np.array(bases), rope.period)
                return (-found if rope.backward else found), 1.0
        raise ValueError(f"the frequencies of {rope} do not depend on the length")

    def rows(self, floors: Ints, positions: Ints) -> Ints:
        """Return each token's row of the tables [T]. floors [T]: those of the tokens' sequences."""
        rows: Ints = np.searchsorted(self._breaks, np.maximum(floors, positions + 1))
        return rows


def frequencies(rope: Rope, length: int) -> tuple[Floats, float]:
    """Return the angle per position of each rotated pair [dim / 2], and the factor on cosines and sines.

    length: tokens of the context, on which the frequencies of dynamic NTK and LongRoPE depend.
    """
    found, factor = _forward(rope, length)
    return (-found if rope.backward else found), factor


def _forward(rope: Rope, length: int) -> tuple[Floats, float]:
    """Return the angle per position of each rotated pair [dim / 2], and the factor on cosines and sines.

    length: tokens of the context, on which the frequencies of dynamic NTK and LongRoPE depend.
    """
    match rope.scaling:
        case None:
            return _inverse(rope.theta, rope.period), 1.0
        case LinearScaling(factor):
            return _single(_inverse(rope.theta, rope.period) / np.float32(factor)), 1.0
        case DynamicNTKScaling() as s:
            return _inverse(s.theta(rope.theta, rope.period, length), rope.period), 1.0
        case Llama3Scaling() as s:
            return _llama3(_inverse(rope.theta, rope.period), s), 1.0
        case YarnScaling() as s:
            return _yarn(rope, s), s.attention_factor
        case ProportionalScaling(pairs, factor):
            inverse = _inverse(rope.theta, rope.period)
            inverse[pairs:] = 0
            return _single(inverse / np.float32(factor)), 1.0
        case LongRopeScaling() as s:
            divisors = np.array(s.divisors(length), np.float32)
            return _single(np.float32(1) / (divisors * _powers(rope.theta, rope.period))), s.attention_factor


def _single(x: Any) -> Floats:
    return np.asarray(x, np.float32)


def _powers(theta: float | np.ndarray[Any, Any], dim: int) -> Floats:
    exponents = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
    # Rounded once, from float64: closer to the frequencies in training than numpy's float32 power.
    return _single(np.power(_single(theta).astype(np.float64)[..., None], exponents.astype(np.float64)))


def _inverse(theta: float | np.ndarray[Any, Any], dim: int) -> Floats:
    """Return frequencies [dim / 2], or [n, dim / 2] for n bases."""
    return _single(np.float32(1) / _powers(theta, dim))


def _llama3(inverse: Floats, s: Llama3Scaling) -> Floats:
    """Divide low frequencies by the factor, keep high ones, and mix those between linearly in frequency."""
    original = s.original_max_position_embeddings
    # Computed as reciprocal times number, as torch computes number / tensor: the ramp amplifies each rounding.
    wavelength = np.float32(1) / inverse * np.float32(2 * math.pi)
    rotations = np.float32(1) / wavelength * np.float32(original)
    # If both factors are equal, no frequency is between them.
    smooth = (rotations - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor or 1.0)
    mixed = (1 - smooth) * inverse / np.float32(s.factor) + smooth * inverse
    out = np.where(wavelength < original / s.high_freq_factor, inverse, mixed)
    return _single(np.where(wavelength > original / s.low_freq_factor, inverse / np.float32(s.factor), out))


def _yarn(rope: Rope, s: YarnScaling) -> Floats:
    """Interpolate below `low` rotations, extrapolate above `high`, a linear ramp between (arXiv:2309.00071, 3.2)."""

    def pair_at(rotations: float) -> float:
        """Return the index, as a real number, of the pair that rotates this often over the trained length."""
        length = s.original_max_position_embeddings / (rotations * 2 * math.pi)
        return rope.dim * math.log(length) / (2 * math.log(rope.theta))

    low, high = pair_at(s.beta_fast), pair_at(s.beta_slow)
    if s.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    span = high - low or 0.001  # a ramp of no length would divide by zero
    ramp = np.clip((np.arange(rope.dim // 2, dtype=np.float32) - low) / span, 0, 1).astype(np.float32)
    powers = _powers(rope.theta, rope.period)
    interpolated = np.float32(1) / (np.float32(s.factor) * powers)
    extrapolated = np.float32(1) / powers
    return _single(interpolated * ramp + extrapolated * (1 - ramp))
