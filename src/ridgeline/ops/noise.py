"""Noise of its own for every token id: standard Gumbel numbers as a function of a key and of the id alone.

The key has 256 bits; sample/sampler.py makes it from a seed, an answer and a position. Each half of it makes a word of
32 bits from the id, with the same bits on every machine: the id times 0x9e3779b1 (Knuth's multiplicative hash) goes
through the hash function of two rounds "16 21f0aaad 15 735a2d97 15" (Chris Wellons' hash-prospector), with 32 bits of
the key added before each round and after the last. Without the product, the words of two ids that differ in one high
bit are not independent. Both words make a number v of 52 bits in (0, 1), never 0 or 1, and g = -log(-log(1 - v)), from
-3.61 to 36.74. The kernels have the same definition (csrc/kernels/draw.cpp).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

Floats = np.ndarray[Any, np.dtype[np.floating[Any]]]
Ints = np.ndarray[Any, np.dtype[np.int64]]
Words = np.ndarray[Any, np.dtype[np.uint32]]
Key = tuple[int, int, int, int]  # 64 bits each

SPREAD = np.uint32(0x9E3779B1)
# The rounds of the hash function: x ^= x >> shift; x *= factor. After them, x ^= x >> 15.
_SHIFTS = (np.uint32(16), np.uint32(15), np.uint32(15))
_FACTORS = (np.uint32(0x21F0AAAD), np.uint32(0x735A2D97))


def gumbel(key: Key, ids: Ints) -> Floats:
    """Return independent standard Gumbel numbers [n], float64, one for each token id."""
    high, low = (scrambled(one, two, ids) for one, two in (key[:2], key[2:]))
    v = (high.astype(np.float64) * 2.0**20 + (low >> np.uint32(12)) + 0.5) * 2.0**-52
    return -np.log(-np.log1p(-v))


def scrambled(one: int, two: int, ids: Ints) -> Words:
    """Return 32 random bits for each token id, [n]. one, two: the two words of half a key."""
    words = ids.astype(np.uint32)
    words *= SPREAD
    scramble(words, np.empty_like(words), parts_of(one, two))
    return words


def parts_of(one: int, two: int) -> tuple[np.uint32, np.uint32, np.uint32]:
    """Return the parts of half a key that are added in turn."""
    return np.uint32(one & 0xFFFFFFFF), np.uint32(one >> 32), np.uint32(two & 0xFFFFFFFF)


def scramble(words: Words, room: Words, parts: Sequence[np.uint32]) -> None:
    """Replace the products of token ids [n] by random words, in place. room [n]: is overwritten."""
    for part, shift, factor in zip(parts[:2], _SHIFTS[:2], _FACTORS, strict=True):
        words += part
        words ^= np.right_shift(words, shift, out=room)
        words *= factor
    words ^= np.right_shift(words, _SHIFTS[2], out=room)
    words += parts[2]
