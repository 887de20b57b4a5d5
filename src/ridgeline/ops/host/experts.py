"""Choose the experts of each token, and run them: grouped by expert, then in the order of tokens again."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ridgeline.ops.api import Expert
from ridgeline.ops.host.attention import exponentials
from ridgeline.ops.host.memory import Ndarray
from ridgeline.ops.host.primitives import sigmoid
from ridgeline.spec import ExpertGroups, MoE, SparseMixer


def route(case: MoE) -> Callable[..., tuple[Ndarray, Ndarray]]:
    # Where only the order matters, experts are chosen by logits: a softmax rounds some unequal logits to equal scores.
    plain = case.scores == "softmax" and not case.choice_bias and case.groups is None
    count = case.num_experts_per_tok

    def choose(
        logits: Ndarray, choice_bias: Ndarray | None = None, factors: Ndarray | None = None
    ) -> tuple[Ndarray, Ndarray]:
        if isinstance(case.scores, SparseMixer):
            ids, chosen = _mix_sparsely(case.scores, logits, count)
            chosen = chosen / chosen.sum(-1, keepdims=True) if case.normalize else chosen
        elif plain:
            ids = _best(logits, count)
            found = _chosen(logits, ids)
            chosen = _softmax(found) if case.normalize else _chosen(_softmax(logits), ids)
        else:
            scores = _softmax(logits) if case.scores == "softmax" else sigmoid(logits)
            rated = logits if case.rates_logits else scores
            rated = rated if choice_bias is None else rated + choice_bias
            if case.groups:
                rated = np.where(_in_best_groups(case.groups, rated), rated, -np.inf)
            ids = _best(rated, count)
            chosen = _chosen(scores, ids)
            if case.normalize:
                chosen = chosen / chosen.sum(-1, keepdims=True)
        chosen = chosen * case.scale if case.scale != 1.0 else chosen
        return ids, chosen if factors is None else chosen * factors[ids]

    return choose


def _mix_sparsely(case: SparseMixer, logits: Ndarray, count: int) -> tuple[Ndarray, Ndarray]:
    """Return the ids of the chosen experts and their weights, both [T, count]."""
    rest, ids, weights = logits, [], []
    for _ in range(count):
        best = rest.max(-1, keepdims=True)
        far = (best - logits) / np.maximum(np.abs(logits), best) > 2 * case.tolerance
        ids.append(_best(rest, 1))
        weights.append(_chosen(_softmax(np.where(far, -np.inf, rest)), ids[-1]))
        rest = rest.copy()
        np.put_along_axis(rest, ids[-1], -np.inf, -1)
    return np.concatenate(ids, -1), np.concatenate(weights, -1)


def _softmax(x: Ndarray) -> Ndarray:
    out = x.copy()
    out /= exponentials(out)
    return out


def _chosen(scores: Ndarray, ids: Ndarray) -> Ndarray:
    return np.take_along_axis(scores, ids, -1)


def _best(scores: Ndarray, count: int) -> Ndarray:
    """Return the indices of the largest scores, the first of equal ones. NaN counts as the largest, so it shows."""
    order = np.where(np.isnan(scores), -np.inf, -scores).argsort(-1, kind="stable")
    return order[..., :count]


def _in_best_groups(groups: ExpertGroups, rated: Ndarray) -> Ndarray:
    """Return which experts belong to a group that may be chosen from, [T, experts]."""
    by_group = rated.reshape(*rated.shape[:-1], groups.count, -1)
    best = 1 if groups.score == "best" else 2
    score = np.sort(by_group, -1)[..., ::-1][..., :best].sum(-1)
    is_open = np.zeros(score.shape, bool)
    np.put_along_axis(is_open, _best(score, groups.chosen), True, -1)
    return np.broadcast_to(is_open[..., None], by_group.shape).reshape(rated.shape)


def experts(case: MoE) -> Callable[..., Ndarray]:
    share = np.float32(case.identity.share if case.identity else 1.0)

    def run(x: Ndarray, ids: Ndarray, scores: Ndarray, expert: Expert) -> Ndarray:
        pairs = ids.ravel()  # one row per (token, choice), grouped by expert below
        order = pairs.argsort(kind="stable")
        counts = np.bincount(pairs, minlength=case.choices)
        ends = counts.cumsum()
        tokens = order // case.num_experts_per_tok
        by_choice = np.empty((pairs.size, x.shape[1]), x.dtype)
        for e in counts.nonzero()[0]:
            some = slice(ends[e] - counts[e], ends[e])
            # In token order again: each token's sum runs over its own choices, whatever the batch contains.
            rows = x[tokens[some]]
            if case.weighs_inputs:
                rows *= scores.reshape(-1, 1)[order[some]]
            by_choice[order[some]] = expert(int(e), rows) if e < case.num_experts else rows * share
        by_choice = by_choice.reshape(*ids.shape, -1)
        if not case.weighs_inputs:
            by_choice *= scores[..., None]
        out: Ndarray = by_choice.sum(1)
        return out

    return run
