"""Arithmetic on scores: filters, the draw, log probabilities.

A row's result never depends on the rows beside it, bit for bit: everything is element by element, or a reduction
along one contiguous row. Ties go to the lower token id.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ridgeline.spec.request import SamplingParams, TokenLogprobs

Floats = np.ndarray[Any, np.dtype[np.floating[Any]]]
Ints = np.ndarray[Any, np.dtype[np.int64]]

_NOTHING = -700.0  # exp of a score below this is 0: less than 1e-304 of the best, and slow to compute
_CHUNK = 256  # tokens whose probabilities are added up first, when a draw looks for its place
_GROUP = 16  # scores of which the best one stands for all, when a bound on the best ones is looked for
_FEW = 512  # of the best, among which a nucleus is looked for first; where it is larger:
_BINS = 16 * 64  # of ranks: 16 to a factor e, down to exp(-64) of the best; the last one holds all below


def filter_scores(scores: Floats, params: SamplingParams) -> None:
    """Apply top_k, top_p, min_p and typical_p to scores [vocabulary] in place, each to what the one before left.

    scores: float64 after temperature, the best one 0. What is removed becomes minus infinity.
    """
    ids = kept_ids(scores, params)
    if ids is not None:
        left = scores[ids]
        scores.fill(-np.inf)
        scores[ids] = left


def kept_ids(scores: Floats, params: SamplingParams) -> Ints | None:
    """The ids that those filters leave, ascending; None for all."""
    steps: list[Callable[[Floats], Ints]] = []
    if 0 < params.top_k < scores.size:
        steps.append(lambda left: top_k(left, params.top_k))
    if params.top_p < 1:
        steps.append(lambda left: top_p(left, params.top_p))
    if params.min_p > 0:
        steps.append(lambda left: np.flatnonzero(left >= np.log(params.min_p)))
    if params.typical_p < 1:
        steps.append(lambda left: typical_p(left, params.typical_p))
    ids: Ints | None = None
    for step in steps:
        kept = step(scores if ids is None else scores[ids])
        ids = kept if ids is None else ids[kept]
    return ids


def top_k(scores: Floats, count: int) -> Ints:
    """The ids of the `count` highest scores, ascending; 1 <= count <= len(scores)."""
    pool = _best(scores, count)
    found = scores[pool]
    last = np.partition(found, found.size - count)[found.size - count]
    ids: Ints = pool[found >= last]
    if ids.size > count:  # equals of the last one: the lower ids stay
        ids = np.delete(ids, np.flatnonzero(scores[ids] == last)[count - ids.size :])
    return ids


def top_p(scores: Floats, mass: float) -> Ints:
    """The ids of the fewest, most likely tokens that together have probability `mass`, ascending (arXiv:1904.09751)."""
    return _nucleus(scores, _exp(scores), mass)


def typical_p(scores: Floats, mass: float) -> Ints:
    """The ids of the fewest tokens that together have probability `mass`, ascending, taking those first whose
    information is closest to the distribution's entropy (arXiv:2202.00666)."""
    weights = _exp(scores)
    information = np.log(weights.sum()) - scores
    entropy = (weights * np.where(weights > 0, information, 0)).sum() / weights.sum()  # 0 log 0 is 0
    return _nucleus(-np.abs(information - entropy), weights, mass)


def _nucleus(rank: Floats, weights: Floats, mass: float) -> Ints:
    """The ids with the highest ranks, as few as have `mass` of all weight, ascending. rank: at most 0."""
    total, before = weights.sum(), 0.0
    kept, open_ids = np.zeros(rank.size, np.bool_), _best(rank, _FEW)
    if weights[open_ids].sum() <= mass * total * (1 + 1e-12):  # sums in other orders differ in the last digits
        bins = np.minimum(rank * (-_BINS / 64), _BINS - 1).astype(np.int64)
        sums = np.bincount(bins, weights).cumsum()
        edge = min(int(np.searchsorted(sums, mass * total)), sums.size - 1)
        kept, open_ids = bins < edge, np.flatnonzero(bins == edge)
        before = sums[edge - 1] if edge else 0.0
    order = open_ids[np.argsort(-rank[open_ids], kind="stable")]
    # All before the sum gets there, and one more.
    count = int(np.searchsorted((before + weights[order].cumsum()) / total, mass)) + 1
    kept[order[:count]] = True
    return np.flatnonzero(kept)


def _best(rank: Floats, count: int) -> Ints:
    """The ids, ascending, of the `count` highest ranks, and of some more, or all: none that is left out is as high.

    Sorting a vocabulary is slow. Of its groups, each has a best one; the `count`-th of these is no higher than the
    `count`-th of all.
    """
    groups = rank.size // _GROUP
    if count > groups // 4:
        return np.arange(rank.size)
    tops = rank[: groups * _GROUP].reshape(_GROUP, groups).max(axis=0)
    return np.flatnonzero(rank >= np.partition(tops, groups - count)[groups - count])


def _exp(scores: Floats) -> Floats:
    return np.exp(scores, out=np.zeros_like(scores), where=scores > _NOTHING)


def draw(scores: Floats, uniforms: Floats) -> Ints:
    """One token for each row: the one whose slice of [0, 1) holds the row's number, slices in order of token id.

    scores [n, vocabulary]: logarithms of weights, the largest near 0. uniforms [n], in [0, 1). Returns [n].
    """
    rows, vocabulary = scores.shape
    chunks = -(-vocabulary // _CHUNK)
    weights = np.zeros((rows, chunks * _CHUNK))
    np.exp(scores, out=weights[:, :vocabulary], where=scores > _NOTHING)
    weights = weights.reshape(rows, chunks, _CHUNK)
    edges = weights.sum(axis=2).cumsum(axis=1)
    target = uniforms * edges[:, -1]
    each = np.arange(rows)
    chunk = _first_above(edges, target)
    before = np.where(chunk > 0, edges[each, chunk - 1], 0)
    return chunk * _CHUNK + _first_above(weights[each, chunk].cumsum(axis=1), target - before)


def _first_above(edges: Floats, target: Floats) -> Ints:
    """For each row, the first place where the running sum is above its target: never one that adds nothing."""
    # Rounding may put the target at the end: then the last place that adds something, the first with the whole sum.
    places: Ints = ((edges > target[:, None]) | (edges == edges[:, -1:])).argmax(axis=1)
    return places


def log_softmax(scores: Floats) -> Floats:
    """[n, vocabulary] in float64."""
    out = np.array(scores, np.float64, order="C")
    out -= out.max(axis=1, keepdims=True)
    out -= np.log(_exp(out).sum(axis=1, keepdims=True))
    return out


def row_logprobs(scores: Floats, tokens: Sequence[int], counts: Sequence[int]) -> list[TokenLogprobs]:
    """Under the softmax of each row of scores [n, vocabulary]: of tokens [n], and of the counts [n] most likely."""
    entries = []
    for row, token, count in zip(log_softmax(scores), tokens, counts, strict=True):
        best = top_k(row, min(count, row.size)) if count else np.empty(0, np.int64)
        best = best[np.argsort(-row[best], kind="stable")]
        top = tuple((int(t), float(row[t])) for t in best if row[t] > -np.inf)
        entries.append(TokenLogprobs(int(token), float(row[token]), top))
    return entries
