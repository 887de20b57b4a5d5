"""The choice of experts, and their products, by kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ridgeline import _kernels
from ridgeline._kernels import Experts, Norm, Pool
from ridgeline.ops import api
from ridgeline.ops.api import Weights
from ridgeline.ops.cpu.kernel import Kernel, Kernels, empty, integers
from ridgeline.ops.cpu.linear import activation_of, rows_of
from ridgeline.ops.cpu.matrices import Floats, build_matrix
from ridgeline.spec import MoE, SparseMixer

Ints = np.ndarray[Any, np.dtype[np.int64]]


def refuses_route(case: MoE) -> str | None:
    """Return why no kernel chooses experts; None if one does."""
    if isinstance(case.scores, SparseMixer):
        return "no kernel chooses experts one after the other"
    return "no kernel adds the bias of the choice to logits" if case.rates_logits else None


def refuses_inputs(case: MoE) -> str | None:
    """Return why no kernel runs experts; None if one does."""
    return "no kernel multiplies the inputs of experts with their scores" if case.weighs_inputs else None


def route(case: MoE, pool: Pool) -> Callable[..., tuple[Ints, Floats]]:
    count, groups = case.num_experts_per_tok, case.groups
    how = (groups.count, groups.chosen, groups.score == "best_two") if groups else (0, 0, False)
    scores = case.scores == "sigmoid", case.normalize, case.scale

    def choose(logits: Floats, choice_bias: Floats | None = None, factors: Floats | None = None) -> tuple[Ints, Floats]:
        ids, weights = integers(pool, len(logits), count), empty(pool, len(logits), count)
        _kernels.route(pool, *how, *scores, rows_of(logits), choice_bias, ids, weights)
        if factors is None:
            return ids, weights
        own, scaled = empty(pool, ids.size, 1), empty(pool, *weights.shape)
        _kernels.embed(pool, factors.reshape(-1, 1), "float32", ids.reshape(-1), own)
        _kernels.multiply(pool, weights, own.reshape(weights.shape), scaled)
        return ids, scaled

    return choose


def experts(case: MoE, weights: Weights, pool: Pool) -> Callable[[Floats, Ints, Floats], Floats]:
    kernel = build_experts(case, weights, pool)

    def run(x: Floats, ids: Ints, scores: Floats) -> Floats:
        out = empty(pool, *x.shape)
        kernel(rows_of(x), np.ascontiguousarray(ids), np.ascontiguousarray(scores), None, None, out)
        return out

    return run


def build_experts(case: MoE, weights: Weights, pool: Pool, norm: Norm | None = None) -> Experts:
    """Pack the matrices of all experts. norm: a norm of the input, or None."""
    down = [build_matrix(pool, [matrix]) for matrix in weights.experts["down"]]
    if case.gated:
        pairs = zip(weights.experts["gate"], weights.experts["up"], strict=True)
        up = [build_matrix(pool, pair, interleave=True) for pair in pairs]
    else:
        up = [build_matrix(pool, [matrix]) for matrix in weights.experts["up"]]
    same = (case.identity.count, case.identity.share) if case.identity else (0, 1.0)
    return Experts(pool, up, down, norm, *activation_of(case.activation), *same)


KERNELS: Kernels = {api.ROUTE: Kernel(refuses_route, route)}
