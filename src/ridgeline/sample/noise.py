"""Draw a token with noise of its own for every token id, so that two models which share the noise agree often.

The token that is drawn is the one with the largest score + g(token id), where the g are independent standard Gumbel
numbers: its distribution is the softmax of the scores (Gumbel 1954; Maddison et al., arXiv:1411.0030). A draft model
that draws with the same noise then proposes what its target draws more often than with one number that is walked
through the token ids (arXiv:2408.07978). ops/noise.py makes the numbers from a key, a block of Philox (NoiseKey in
sample/sampler.py), and two words of 32 bits; the second word is needed only for the few tokens that can win.
"""

from __future__ import annotations

import numpy as np

from ridgeline.ops.noise import SPREAD, Key, Words, gumbel, parts_of, scramble
from ridgeline.sample.logits import Floats, Ints

# Numbers of the streams of noise at one position: the token; whether XTC acts; in rejection sampling the draft, whether
# it is accepted, and the token in place of a rejected one; in a pass of a diffusion model the order of positions, and
# the random token of a canvas.
PURPOSE_SAMPLE, PURPOSE_XTC, PURPOSE_DRAFT, PURPOSE_ACCEPT, PURPOSE_RESIDUAL, PURPOSE_ORDER, PURPOSE_CANVAS = range(7)

_BLOCK = 1 << 14  # words that are scrambled at once: they and their copy fit a core's cache
_IDS: Words = np.arange(_BLOCK, dtype=np.uint32) * SPREAD
_FEW = 4096  # of at most so many tokens each gets its noise exactly
_SLACK = 1e-4  # rounding of the bounds in float32 is below 3e-5 for every token that can win
_MANTISSA = np.float32(-np.log(2) / 2**23)
_OFFSET = (127 + 32) * np.log(2)


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


def _bounds(scores: Floats, ids: Ints | None, key: Key) -> Floats:
    """Return upper bounds [n], float32, of the sums of score and noise, less _OFFSET.

    The bits of a float32 x, read as an integer, over 2**23 and less 127, are at most log2(x), and at least log2(x) -
    0.0861. Here x is the first word of the noise, which is at most v * 2**32.
    """
    with np.errstate(over="ignore"):  # a score below -1e38 becomes minus infinity
        bounds = scores.astype(np.float32)
    parts = parts_of(*key[:2])
    words, room, logs = np.empty(_BLOCK, np.uint32), np.empty(_BLOCK, np.uint32), np.empty(_BLOCK, np.float32)
    for start in range(0, scores.size, _BLOCK):
        out = bounds[start : start + _BLOCK]
        block, spare, log = words[: out.size], room[: out.size], logs[: out.size]
        if ids is None:
            np.add(_IDS[: out.size], np.uint32(start * int(SPREAD) & 0xFFFFFFFF), out=block)
        else:
            np.multiply(ids[start : start + _BLOCK].astype(np.uint32), SPREAD, out=block)
        scramble(block, spare, parts)
        log[:] = block
        out += np.multiply(log.view(np.int32), _MANTISSA, out=log, dtype=np.float32, casting="unsafe")
    return bounds
