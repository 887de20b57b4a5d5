"""Filters: each keeps some tokens of a distribution. They act after the temperature, in the order of `FILTERS`.

A filter gets the scores of the tokens that the filter before it kept: logarithms of weights, float64, the best one 0. A
new filter is declared in spec/request.py, at Stage.FILTER, and gets its function and its line in `FILTERS` here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from ridgeline.sample.logits import Floats, Ints, exp_scores, nucleus, top_k
from ridgeline.sample.noise import PURPOSE_XTC
from ridgeline.spec.request import SAMPLING, SamplingParams

Uniform = Callable[[int], float]  # from a purpose to a number in [0, 1): the noise of one token
Filter = Callable[[Floats, SamplingParams, Uniform], Ints | None]


def keep_top_n_sigma(scores: Floats, params: SamplingParams, uniform: Uniform) -> Ints | None:
    """Return the ids of the scores that lie at most n standard deviations below the best one (arXiv:2411.07641).

    The result does not depend on the temperature, which scales scores and deviation alike.
    """
    if params.top_n_sigma <= 0:
        return None
    possible = scores[scores > -np.inf]
    scale = -float(possible.min())
    if scale == 0:
        return None
    deviation = (possible / scale).std()  # scaled, so that squares of huge scores stay finite
    ids: Ints = np.flatnonzero(scores / scale >= -params.top_n_sigma * deviation)
    return ids


def keep_top_k(scores: Floats, params: SamplingParams, uniform: Uniform) -> Ints | None:
    """Return the ids of the top_k best scores, ascending."""
    return top_k(scores, params.top_k) if 0 < params.top_k < scores.size else None


def keep_top_p(scores: Floats, params: SamplingParams, uniform: Uniform) -> Ints:
    """Return the ids of the fewest most likely tokens that together have probability top_p (arXiv:1904.09751)."""
    return nucleus(scores, exp_scores(scores), params.top_p)


def keep_min_p(scores: Floats, params: SamplingParams, uniform: Uniform) -> Ints:
    """Return the ids of the tokens with at least min_p of the best one's probability (arXiv:2407.01082)."""
    return np.flatnonzero(scores >= np.log(params.min_p))


def keep_typical_p(scores: Floats, params: SamplingParams, uniform: Uniform) -> Ints:
    """Return the ids of the fewest tokens that together have probability typical_p (arXiv:2202.00666).

    Tokens whose information is closest to the entropy of the distribution are taken first.
    """
    weights = exp_scores(scores)
    information = np.log(weights.sum()) - scores
    entropy = (weights * np.where(weights > 0, information, 0)).sum() / weights.sum()  # 0 log 0 is 0
    return nucleus(-np.abs(information - entropy), weights, params.typical_p)


def keep_xtc(scores: Floats, params: SamplingParams, uniform: Uniform) -> Ints | None:
    """Return the ids without the top choices, or None: "exclude top choices" as by llama.cpp.

    With xtc_probability, all tokens of at least xtc_threshold are removed except the least likely of them: of equal
    ones, the lowest id stays. The number that decides comes from the request's own noise at this position.
    """
    if params.xtc_threshold > 0.5 or uniform(PURPOSE_XTC) >= params.xtc_probability:
        return None
    weights = exp_scores(scores)
    top = np.flatnonzero((weights > 0) & (weights >= params.xtc_threshold * weights.sum()))
    if top.size < 2:
        return None
    return np.delete(np.arange(scores.size), np.delete(top, scores[top].argmin()))


# Keys are the parameters that switch the filters on; the order is the one in which they act.
FILTERS: Mapping[str, Filter] = {
    "top_n_sigma": keep_top_n_sigma,
    "top_k": keep_top_k,
    "top_p": keep_top_p,
    "min_p": keep_min_p,
    "typical_p": keep_typical_p,
    "xtc_probability": keep_xtc,
}
_OFF = {name: default for name, default, _ in SAMPLING if name in FILTERS}


def filters_of(params: SamplingParams) -> tuple[Filter, ...]:
    """Return the filters that `params` turn on, in order."""
    return tuple(keep for name, keep in FILTERS.items() if getattr(params, name) != _OFF[name])


def kept_ids(
    scores: Floats, params: SamplingParams, uniform: Uniform, filters: tuple[Filter, ...] | None = None
) -> Ints | None:
    """Return the ids that the filters keep, ascending; None for all. filters: the active filters, if known."""
    ids: Ints | None = None
    for keep in filters_of(params) if filters is None else filters:
        kept = keep(scores if ids is None else scores[ids], params, uniform)
        if kept is not None:
            ids = kept if ids is None else ids[kept]
    return ids


def filter_scores(scores: Floats, params: SamplingParams, uniform: Uniform) -> None:
    """Apply the filters to scores [vocabulary] in place: minus infinity for the tokens that they remove."""
    ids = kept_ids(scores, params, uniform)
    if ids is not None:
        left = scores[ids]
        scores.fill(-np.inf)
        scores[ids] = left
