"""Draw a token from each row of logits: the definitions of the ops DRAW and ACCEPT, in numpy.

It is the token that the sampler takes with the same key, temperature and filters (sample/sampler.py). So a recorded
step can draw, and a draft that it draws is one that the host would have drawn. ACCEPT first tries the drafts of a row,
as point masses by rejection sampling or by typical acceptance (sample/rejection.py).
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from math import isfinite
from typing import Any, NamedTuple

import numpy as np

from ridgeline.ops.noise import Ints, Key, gumbel

Floats = np.ndarray[Any, np.dtype[np.float32]]
Doubles = np.ndarray[Any, np.dtype[np.float64]]
Mask = np.ndarray[Any, np.dtype[np.bool_]]

_WORDS, _TRIAL = struct.Struct("=4Qdqdd"), struct.Struct("=qqqqd")
DRAW_WORDS, TRIAL_WORDS = _WORDS.size // 8, _TRIAL.size // 8
LEAST_TEMPERATURE = 1e-30  # of a draw; below it, scores are too large for float32
# Typical acceptance (Medusa, arXiv:2401.10774): accept p(d) > min(EPSILON, DELTA exp(-entropy of p)), its defaults.
TYPICAL_EPSILON, TYPICAL_DELTA = 0.09, 0.3


class Trial(NamedTuple):
    """Which drafts are tried at a row of logits, and which draft the row itself belongs to.

    The drafts for one position are tried in turn. first: the row of the first one lies so many rows after this row; 0:
    none is tried. following: the draft that is tried after this row's own one has its row so many rows later; 0: there
    is none. token: the row's own draft; -1: it has none. uniform: a number in [0, 1) that decides about it.
    is_typical: by typical acceptance, else by rejection sampling.
    """

    first: int = 0
    following: int = 0
    token: int = -1
    is_typical: bool = False
    uniform: float = 0.0


NO_TRIAL = Trial()


class Draw(NamedTuple):
    """How the token of a row is drawn.

    key: the key of its noise. temperature: above 1e-30, or 0 for the token with the largest logit. The filters act
    after the temperature, in this order: top_k: number of the best tokens that are kept; 0: all. top_p: the fewest best
    tokens with this probability are kept; 1: all. min_p: tokens with at least this share of the best one's probability
    are kept; 0: all. trial: the drafts that the op ACCEPT tries before it draws.
    """

    key: Key = (0, 0, 0, 0)
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    trial: Trial = NO_TRIAL


def pack_draws(draws: Iterable[Draw]) -> Ints:
    """Return n draws as integers [n * DRAW_WORDS]: a kernel finds the bits of each number there."""
    packed = bytearray()
    for each in draws:
        packed += _WORDS.pack(*each.key, each.temperature, each.top_k, each.top_p, each.min_p)
    return np.frombuffer(packed, np.int64)


def pack_trials(draws: Iterable[Draw]) -> Ints:
    """Return the trials of n draws as integers [n * TRIAL_WORDS]."""
    return np.frombuffer(b"".join(_TRIAL.pack(*draw.trial) for draw in draws), np.int64)


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
        kept, scores = _kept(logits[i], top[i], temperature, top_k, top_p, min_p)
        ids = kept if token_ids is None else token_ids[kept]
        found[i] = kept[_drawn(scores, ids, key)]
    return found, top


def accept(logits: Floats, draws: Ints, trials: Ints) -> tuple[Ints, Floats]:
    """Return the token of each row of logits [n, vocabulary], and the row's largest logit, [n] each.

    It is the first draft of the row that is accepted; without one, the row is drawn as by `draw`, and not from the
    drafts that rejection sampling rejected. draws: as in `draw`. trials: as from `pack_trials`.
    """
    found, top = draw(logits, draws, None)
    tried = [Trial(*words) for words in _TRIAL.iter_unpack(trials.tobytes())]
    for i, (*key, temperature, top_k, top_p, min_p) in enumerate(_WORDS.iter_unpack(draws.tobytes())):
        if temperature == 0 or not isfinite(top[i]) or not tried[i].first:
            continue
        kept, scores = _kept(logits[i], top[i], temperature, top_k, top_p, min_p)
        taken, left = _tried(kept, scores, i, tried)
        if taken is not None:
            found[i] = taken
        elif not tried[i].is_typical:
            found[i] = kept[left][_drawn(scores[left], kept[left], key)]
    return found, top


def _kept(
    logits: Floats, top: float, temperature: float, top_k: int, top_p: float, min_p: float
) -> tuple[Ints, Doubles]:
    """Return the tokens that the filters keep of a row of logits, ascending, and their scores; the largest is 0."""
    scores = (logits.astype(np.float64) - top) / temperature
    kept = np.argsort(-logits, kind="stable")[: top_k or None]
    if top_p < 1:
        sums = np.exp(scores[kept]).cumsum()
        kept = kept[: int(np.searchsorted(sums / sums[-1], top_p)) + 1]
    if min_p > 0:
        kept = kept[scores[kept] >= np.log(min_p)]
    kept.sort()
    return kept, scores[kept]


def _drawn(scores: Doubles, ids: Ints, key: Sequence[int]) -> int:
    """Return the index of the largest sum of score and noise."""
    one, two, three, four = key
    return int((scores + gumbel((one, two, three, four), ids)).argmax())


def _tried(kept: Ints, scores: Doubles, row: int, trials: Sequence[Trial]) -> tuple[int | None, Mask]:
    """Return the draft of a row that is accepted, or None, and which of the kept tokens were not rejected before."""
    weights, left, step = np.exp(scores), np.ones(len(kept), np.bool_), trials[row].first
    share = weights / weights.sum()
    possible = share[share > 0]
    least = min(TYPICAL_EPSILON, TYPICAL_DELTA * float(np.exp((possible * np.log(possible)).sum())))
    at = row
    while step:
        at += step
        token, step = trials[at].token, trials[at].following
        is_draft = kept == token
        if trials[row].is_typical:
            is_taken = weights[is_draft].sum() / weights.sum() > least
        else:
            is_taken = trials[at].uniform < weights[is_draft & left].sum() / weights[left].sum()
        if is_taken:
            return token, left
        left &= ~is_draft
    return None, left
