"""Draw a token with noise of its own for every token id, so that two models which share the noise agree often.

The token that is drawn is the one with the largest score + g(token id), where the g are independent standard Gumbel
numbers: its distribution is the softmax of the scores (Gumbel 1954; Maddison et al., arXiv:1411.0030). A draft model
that draws with the same noise then proposes what its target draws more often than with one number that is walked
through the token ids (arXiv:2408.07978).

The noise of a token id is a function of a key and of the id alone. The key is a block of Philox (NoiseKey in
sample/sampler.py). Each half of the key makes a word of 32 bits from the id, with the same bits on every machine: the
id times 0x9e3779b1 (Knuth's multiplicative hash) goes through the hash function of two rounds
"16 21f0aaad 15 735a2d97 15" (Chris Wellons' hash-prospector), with 32 bits of the key added before each round and after
the last. Without the product, the words of two ids that differ in one high bit are not independent. Both words make a
number v of 52 bits in (0, 1), never 0 or 1, and g = -log(-log(1 - v)), from -3.61 to 36.74. The second word is needed
only for the few tokens that can win.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ridgeline.sample.logits import Floats, Ints

Words = np.ndarray[Any, np.dtype[np.uint32]]
Key = tuple[int, int, int, int]  # 64 bits each

# Numbers of the streams of noise at one position: the token; whether XTC acts; in rejection sampling the draft, whether
# it is accepted, and the token in place of a rejected one.
PURPOSE_SAMPLE, PURPOSE_XTC, PURPOSE_DRAFT, PURPOSE_ACCEPT, PURPOSE_RESIDUAL = range(5)

# The rounds of the hash function: x ^= x >> shift; x *= factor. After them, x ^= x >> 15.
_SHIFTS = (np.uint32(16), np.uint32(15), np.uint32(15))
_FACTORS = (np.uint32(0x21F0AAAD), np.uint32(0x735A2D97))
_BLOCK = 1 << 14  # words that are scrambled at once: they and their copy fit a core's cache
_SPREAD = np.uint32(0x9E3779B1)
_IDS: Words = np.arange(_BLOCK, dtype=np.uint32) * _SPREAD
_FEW = 4096  # of at most so many tokens each gets its noise exactly
_SLACK = 1e-4  # rounding of the bounds in float32 is below 3e-5 for every token that can win
_MANTISSA = np.float32(-np.log(2) / 2**23)
_OFFSET = (127 + 32) * np.log(2)


def gumbel(key: Key, ids: Ints) -> Floats:
    """Return independent standard Gumbel numbers [n], float64, one for each token id."""
    high, low = (scrambled(one, two, ids) for one, two in (key[:2], key[2:]))
    v = (high.astype(np.float64) * 2.0**20 + (low >> np.uint32(12)) + 0.5) * 2.0**-52
    return -np.log(-np.log1p(-v))


def draw(scores: Floats, ids: Ints | None, key: Key) -> int:
    """Return the index of the token with the largest sum of score and noise; of equals, the first one.

    scores [n], float64: logarithms of weights, the largest 0. ids [n]: their token ids, ascending; None: 0 to n - 1.

    If there are many, only the tokens whose sum can be the largest are computed in float64. Since -log(1 - v) >= v, no
    sum is above score - log(v), which is cheap to bound.
    """
    if scores.size <= _FEW:
        return int((scores + gumbel(key, np.arange(scores.size) if ids is None else ids)).argmax())
    bounds = _bounds(scores, ids, key)
    first = int(bounds.argmax())
    # The bound is loose by at most 0.06 for the logarithm, and the word that it is from has no more than 32 bits of v.
    most = min(np.exp(float(scores[first]) - float(bounds[first]) - _OFFSET + 0.061) + 2.0**-32, 1 - 2.0**-53)
    least = float(scores[first]) - np.log(-np.log1p(-most)) - _OFFSET - _SLACK
    index = np.flatnonzero(bounds >= np.float32(least))
    if index.size == 1:
        return first
    return int(index[(scores[index] + gumbel(key, index if ids is None else ids[index])).argmax()])


def scrambled(one: int, two: int, ids: Ints) -> Words:
    """Return 32 random bits for each token id, [n]. one, two: the two words of half a key."""
    words = ids.astype(np.uint32)
    words *= _SPREAD
    _scramble(words, np.empty_like(words), _parts(one, two))
    return words


def _bounds(scores: Floats, ids: Ints | None, key: Key) -> Floats:
    """Return upper bounds [n], float32, of the sums of score and noise, less _OFFSET.

    The bits of a float32 x, read as an integer, over 2**23 and less 127, are at most log2(x), and at least log2(x) -
    0.0861. Here x is the first word of the noise, which is at most v * 2**32.
    """
    with np.errstate(over="ignore"):  # a score below -1e38 becomes minus infinity
        bounds = scores.astype(np.float32)
    parts = _parts(*key[:2])
    words, room, logs = np.empty(_BLOCK, np.uint32), np.empty(_BLOCK, np.uint32), np.empty(_BLOCK, np.float32)
    for start in range(0, scores.size, _BLOCK):
        out = bounds[start : start + _BLOCK]
        block, spare, log = words[: out.size], room[: out.size], logs[: out.size]
        if ids is None:
            np.add(_IDS[: out.size], np.uint32(start * int(_SPREAD) & 0xFFFFFFFF), out=block)
        else:
            np.multiply(ids[start : start + _BLOCK].astype(np.uint32), _SPREAD, out=block)
        _scramble(block, spare, parts)
        log[:] = block
        out += np.multiply(log.view(np.int32), _MANTISSA, out=log, dtype=np.float32, casting="unsafe")
    return bounds


def _parts(one: int, two: int) -> tuple[np.uint32, np.uint32, np.uint32]:
    """Return the parts of half a key that are added in turn."""
    return np.uint32(one & 0xFFFFFFFF), np.uint32(one >> 32), np.uint32(two & 0xFFFFFFFF)


def _scramble(words: Words, room: Words, parts: Sequence[np.uint32]) -> None:
    """Replace the products of token ids [n] by random words, in place. room [n]: is overwritten."""
    for part, shift, factor in zip(parts[:2], _SHIFTS[:2], _FACTORS, strict=True):
        words += part
        words ^= np.right_shift(words, shift, out=room)
        words *= factor
    words ^= np.right_shift(words, _SHIFTS[2], out=room)
    words += parts[2]
