"""Experts by kernels: the choice of them, and their products."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ridgeline import _kernels
from ridgeline._kernels import Experts, Norm, Pool
from ridgeline.ops import api
from ridgeline.ops.cpu.kernel import Kernel, Kernels, never
from ridgeline.ops.cpu.linear import activation_of, rows_of
from ridgeline.ops.cpu.matrices import Floats, Ndarray, build_matrix
from ridgeline.spec import MoE

Ints = np.ndarray[Any, np.dtype[np.int64]]
Biases = tuple[Floats | None, Floats, Floats]  # of gate, up and down


def route(case: MoE, pool: Pool) -> Callable[..., tuple[Ints, Floats]]:
    count, groups = case.num_experts_per_tok, case.groups
    how = (groups.count, groups.chosen, groups.score == "best_two") if groups else (0, 0, False)
    scores = case.scores == "sigmoid", case.normalise, case.scale

    def choose(logits: Floats, choice_bias: Floats | None = None) -> tuple[Ints, Floats]:
        ids, weights = np.empty((len(logits), count), np.int64), np.empty((len(logits), count), np.float32)
        _kernels.route(pool, *how, *scores, rows_of(logits), choice_bias, ids, weights)
        return ids, weights

    return choose


def experts(case: MoE, pool: Pool) -> Callable[..., Floats]:
    """The experts of one layer: they are packed at the first call."""
    built: list[Experts] = []

    def run(
        x: Floats, ids: Ints, scores: Floats, gate: Ndarray | None, up: Ndarray, down: Ndarray,
        biases: Biases | None = None,
    ) -> Floats:  # fmt: skip
        if not built:
            built.append(build_experts(case, pool, (gate, up, down), biases))
        out = np.empty(x.shape, np.float32)
        built[0](rows_of(x), np.ascontiguousarray(ids), np.ascontiguousarray(scores), None, None, out)
        return out

    return run


def build_experts(
    case: MoE,
    pool: Pool,
    weights: tuple[Ndarray | None, Ndarray, Ndarray],
    biases: Biases | None,
    norm: Norm | None = None,
) -> Experts:
    """weights: gate and up [experts, inner, width], down [experts, width, inner]. norm: of what comes."""
    gate, up, down = weights
    firsts, seconds = [], []
    for e in range(case.num_experts):
        b_gate, b_up, b_down = (None if b is None else b[e] for b in biases or (None, None, None))
        if gate is None:
            firsts.append(build_matrix(pool, [up[e]], [b_up]))
        else:
            firsts.append(build_matrix(pool, [gate[e], up[e]], [b_gate, b_up], interleave=True))
        seconds.append(build_matrix(pool, [down[e]], [b_down]))
    return Experts(pool, firsts, seconds, norm, *activation_of(case.activation))


KERNELS: Kernels = {api.ROUTE: Kernel(never, route), api.EXPERTS: Kernel(never, experts)}
