"""Compute with scores: the best ones, log probabilities.

A row's result never depends on the rows beside it, bit for bit: everything is element by element, or a reduction
along one contiguous row. Ties go to the lower token id.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ridgeline.spec.request import TokenLogprobs

Floats = np.ndarray[Any, np.dtype[np.floating[Any]]]
Ints = np.ndarray[Any, np.dtype[np.int64]]

_NOTHING = -700.0  # exp of a score below this is 0: less than 1e-304 of the best, and slow to compute
_GROUP = 16  # `_best` first compares the maxima of groups of this many scores
_FEW = 512  # a nucleus is first searched among this many of the best scores; if it is larger, in bins:
_BINS = 16 * 64  # number of bins of ranks: 16 to a factor e, down to exp(-64) of the best; the last has all below


def top_k(scores: Floats, count: int) -> Ints:
    """Return the ids of the `count` highest scores, ascending; 1 <= count <= len(scores)."""
    pool = _best(scores, count)
    found = scores[pool]
    last = np.partition(found, found.size - count)[found.size - count]
    ids: Ints = pool[found >= last]
    if ids.size > count:  # several scores equal the last one: keep the lower ids
        ids = np.delete(ids, np.flatnonzero(scores[ids] == last)[count - ids.size :])
    return ids


def nucleus(rank: Floats, weights: Floats, mass: float, total: float | None = None) -> Ints:
    """Return the fewest ids of the highest ranks that have `mass` of all weight, ascending.

    rank: at most 0. total: all weight, if there are ids of lower ranks that are not given; None: the sum of weights.
    """
    total, before = weights.sum() if total is None else total, 0.0
    kept, open_ids = np.zeros(rank.size, np.bool_), _best(rank, _FEW)
    if weights[open_ids].sum() <= mass * total * (1 + 1e-12):  # sums in other orders differ in the last digits
        bins = np.minimum(rank * (-_BINS / 64), _BINS - 1).astype(np.int64)
        sums = np.bincount(bins, weights).cumsum()
        edge = min(int(np.searchsorted(sums, mass * total)), sums.size - 1)
        kept, open_ids = bins < edge, np.flatnonzero(bins == edge)
        before = sums[edge - 1] if edge else 0.0
    order = open_ids[np.argsort(-rank[open_ids], kind="stable")]
    # All ids before the sum reaches the mass, and the one that reaches it.
    count = int(np.searchsorted((before + weights[order].cumsum()) / total, mass)) + 1
    kept[order[:count]] = True
    return np.flatnonzero(kept)


def _best(rank: Floats, count: int) -> Ints:
    """Return ids, ascending, that contain those of the `count` highest ranks; every other rank is lower.

    Sorting a whole vocabulary is slow. The `count`-th best of the maxima of its groups is no higher than the
    `count`-th best of all, so it bounds the search.
    """
    groups = rank.size // _GROUP
    if count > groups // 4:
        return np.arange(rank.size)
    tops = rank[: groups * _GROUP].reshape(_GROUP, groups).max(axis=0)
    return np.flatnonzero(rank >= np.partition(tops, groups - count)[groups - count])


def exp_scores(scores: Floats) -> Floats:
    """Return exp of the scores; 0 where they are negligible."""
    return np.exp(scores, out=np.zeros_like(scores), where=scores > _NOTHING)


def log_softmax(scores: Floats) -> Floats:
    """Return log probabilities [n, vocabulary] in float64."""
    out: Floats = np.subtract(scores, scores.max(axis=1, keepdims=True), dtype=np.float64, order="C")
    out -= np.log(exp_scores(out).sum(axis=1, keepdims=True))
    return out


def row_logprobs(scores: Floats, tokens: Sequence[int], counts: Sequence[int]) -> list[TokenLogprobs]:
    """Return for each row of scores [n, vocabulary] the log probabilities of its token and of its most likely tokens.

    tokens [n]: the token of each row. counts [n]: how many of the most likely tokens to report.
    """
    entries = []
    for row, token, count in zip(log_softmax(scores), tokens, counts, strict=True):
        best = top_k(row, min(count, row.size)) if count else np.empty(0, np.int64)
        best = best[np.argsort(-row[best], kind="stable")]
        top = tuple((int(t), float(row[t])) for t in best if row[t] > -np.inf)
        entries.append(TokenLogprobs(int(token), float(row[token]), top))
    return entries
