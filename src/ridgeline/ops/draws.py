"""Draw a token from each row of logits: the definition of the op DRAW, in numpy.

It is the token that the sampler takes with the same key, temperature and filters (sample/sampler.py). So a recorded
step can draw, and a draft that it draws is one that the host would have drawn.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from math import isfinite
from typing import Any, NamedTuple

import numpy as np

from ridgeline.ops.noise import Ints, Key, gumbel

Floats = np.ndarray[Any, np.dtype[np.float32]]

_WORDS = struct.Struct("=4Qdqdd")
DRAW_WORDS = _WORDS.size // 8
LEAST_TEMPERATURE = 1e-30  # of a draw; below it, scores are too large for float32


class Draw(NamedTuple):
    """How the token of a row is drawn.

    key: the key of its noise. temperature: above 1e-30, or 0 for the token with the largest logit. The filters act
    after the temperature, in this order: top_k: number of the best tokens that are kept; 0: all. top_p: the fewest best
    tokens with this probability are kept; 1: all. min_p: tokens with at least this share of the best one's probability
    are kept; 0: all.
    """

    key: Key = (0, 0, 0, 0)
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


def pack_draws(draws: Iterable[Draw]) -> Ints:
    """Return n draws as integers [n * DRAW_WORDS]: a kernel finds the bits of each number there."""
    packed = bytearray()
    for each in draws:
        packed += _WORDS.pack(*each.key, each.temperature, each.top_k, each.top_p, each.min_p)
    return np.frombuffer(packed, np.int64)


def draw(logits: Floats, draws: Ints, token_ids: Ints | None) -> tuple[Ints, Floats]:
    """Return the index that each row of logits [n, vocabulary] draws, and the row's largest logit, [n] each.

    draws: as from `pack_draws`. token_ids: the token of each column, which has its noise; None: its number. Where a
    largest logit is not finite, the index is that of the first NaN, or else of the first infinity.
    """
    found = logits.argmax(axis=1)
    top = logits[np.arange(len(logits)), found]
    for i, (*key, temperature, top_k, top_p, min_p) in enumerate(_WORDS.iter_unpack(draws.tobytes())):
        if temperature == 0 or not isfinite(top[i]):
            continue
        scores = (logits[i].astype(np.float64) - top[i]) / temperature
        kept = np.argsort(-logits[i], kind="stable")[: top_k or None]
        if top_p < 1:
            sums = np.exp(scores[kept]).cumsum()
            kept = kept[: int(np.searchsorted(sums / sums[-1], top_p)) + 1]
        if min_p > 0:
            kept = kept[scores[kept] >= np.log(min_p)]
        kept.sort()
        ids = kept if token_ids is None else token_ids[kept]
        one, two, three, four = key
        found[i] = kept[(scores[kept] + gumbel((one, two, three, four), ids)).argmax()]
    return found, top
