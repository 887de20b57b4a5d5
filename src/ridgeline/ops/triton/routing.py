"""Routers of experts: the primitive ROUTE, and all of a router in one launch where few tokens run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ridgeline.ops.api import Weights
from ridgeline.ops.triton.choice import choose_experts, rate_and_choose
from ridgeline.ops.triton.launch import Compiled, Counters, Launch
from ridgeline.ops.triton.paged import power_above
from ridgeline.ops.triton.products import APART_TOKENS, Dense, StoredProduct
from ridgeline.ops.triton.stages import Begin
from ridgeline.ops.triton.tilings import tilings_of
from ridgeline.spec import MoE, SparseMixer

MOST_EXPERTS = 1023  # counts of all experts lie in the registers of one program
SORT_BLOCK = 1024  # visits that a program of `sort_visits` counts at once
MOST_SORTED = 512  # visits that the program of one token sorts alone, beside its choice


def refuses_route(case: MoE | None) -> str | None:
    """Return why no kernel chooses experts; None if one does, and without a case if one serves some."""
    if case is not None and case.expert_scale:
        return "no kernel multiplies the weights of experts with learned numbers"
    if case is not None and (case.rates_logits or isinstance(case.scores, SparseMixer)):
        return "no kernel chooses experts in this way"
    if case is not None and case.identity:
        return "no kernel has experts whose result is their input"
    if case is not None and case.num_experts > MOST_EXPERTS:
        return f"there are {case.num_experts} experts; kernels take {MOST_EXPERTS} at most"
    return None


class Visits(NamedTuple):
    """The pairs of a token and an expert of a step, in the order of experts; see `choice.sort_visits`."""

    tokens: int
    order: Tensor
    table: Tensor
    num_blocks: Tensor
    block_tokens: int


class Choice(NamedTuple):
    """The experts of each token and their weights [T, k]; a gate of the shared expert [T, 1], and sorted visits."""

    ids: Tensor
    weights: Tensor
    gate: Tensor | None
    visits: Visits | None


def arguments_of(case: MoE, choice_bias: Tensor | None, choice: Choice) -> dict[str, Any]:
    """Return the arguments of a kernel that chooses experts."""
    groups, visits, pairs = case.groups, choice.visits, choice.ids.numel()
    count, chosen = (groups.count, groups.chosen) if groups else (1, 1)
    return {
        "choice_bias": choice_bias, "ids": choice.ids, "weights": choice.weights, "visits": visits and visits.order,
        "table": visits and visits.table, "num_blocks": visits and visits.num_blocks, "scale": case.scale,
        "pairs": pairs, "most_blocks": visits.table.shape[1] if visits else 0, "EXPERTS": case.num_experts,
        "CHOSEN": case.num_experts_per_tok, "GROUPS": count, "OPEN": chosen,
        "BEST_TWO": groups is not None and groups.score == "best_two", "SIGMOID": case.scores == "sigmoid",
        "NORMALIZE": case.normalize,
        # The definition chooses by logits where only their order matters.
        "PLAIN": case.scores == "softmax" and not case.choice_bias and groups is None,
        "HAS_CHOICE_BIAS": choice_bias is not None, "BLOCK_G": power_above(count),
        "BLOCK_E": power_above(case.num_experts // count), "BLOCK_K": power_above(case.num_experts_per_tok),
        "BLOCK_T": visits.block_tokens if visits else 1, "BLOCK_P": power_above(pairs) if visits else 1,
        "BLOCK_C": power_above(case.num_experts + 1),
    }  # fmt: skip


def chosen_by(case: MoE, logits: Tensor, visits: Visits | None) -> Choice:
    """Return room for the experts of tokens with logits [T, experts, and a gate if there is one]."""
    shape = logits.shape[0], case.num_experts_per_tok
    ids = torch.empty(shape, dtype=torch.int64, device=logits.device)
    weights = torch.empty(shape, dtype=torch.float32, device=logits.device)
    return Choice(ids, weights, logits[:, case.num_experts :] if case.shared_gate else None, visits)


def route(case: MoE, launch: Launch) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return ROUTE, one launch. With `visits` it sorts them, too."""
    counters = Counters()

    def choose(
        logits: Tensor, choice_bias: Tensor | None = None, visits: Visits | None = None
    ) -> tuple[Tensor, Tensor]:
        choice = chosen_by(case, logits, visits)
        if len(logits):
            logits = logits if logits.stride(-1) == 1 else logits.contiguous()
            launch(
                choose_experts, (len(logits),), Compiled(1 if case.num_experts <= 256 else 4),
                logits=logits, stride=logits.stride(0), arrived=visits and counters(1, logits.device),
                **arguments_of(case, choice_bias, choice),
            )  # fmt: skip
        return choice.ids, choice.weights

    return choose


class Router:
    """The sum, the norm, the product with the router's rows, and the choice; with few visits also their order.

    begin: the sum and the norm. unsorted: room for the visits of some tokens.
    """

    def __init__(
        self, case: MoE, begin: Begin, weights: Weights, unsorted: Callable[[int, torch.device], Visits], launch: Launch
    ) -> None:
        self._case, self._begin, self._unsorted, self._launch = case, begin, unsorted, launch
        names = ("router", "shared_gate") if case.shared_gate else ("router",)
        self._product = StoredProduct([weights.linears[n] for n in names], launch)
        self._route, self._choice_bias, self._counters = route(case, launch), weights.vector("choice.bias"), Counters()

    def __call__(self, residual: Tensor, delta: Tensor | None) -> tuple[Tensor, Tensor, Choice]:
        """Return the sum, its norm, and the experts of each token."""
        tokens, case = len(residual), self._case
        visits = None
        if tokens * case.num_experts_per_tok <= MOST_SORTED:
            visits = self._unsorted(tokens, residual.device)
            dense = self._product.dense
            if dense and self._begin.fits_in and 0 < tokens <= APART_TOKENS:
                return self._at_once(dense, residual, delta, visits)
        total, x = self._begin(residual, delta)
        logits = self._product(x)
        ids, scores = self._route(logits[:, : case.num_experts], self._choice_bias, visits)
        return total, x, chosen_by(case, logits, visits)._replace(ids=ids, weights=scores)

    def _at_once(
        self, dense: Dense, residual: Tensor, delta: Tensor | None, visits: Visits
    ) -> tuple[Tensor, Tensor, Choice]:
        """Compute all in one launch, in which each token has programs of its own."""
        norm, total, x = self._begin.inside(residual, delta)
        block = tilings_of().block("dense", "", 1)
        product, grid = dense.arguments(x, len(x), block)
        logits = self._product.room(x, self._product.rows)
        choice = chosen_by(self._case, logits, visits)
        self._launch(
            rate_and_choose, grid, block.compiled,
            **norm, **product, logits=logits, BLOCK_M=block.tokens,
            arrived=self._counters(len(x) * (grid[1] + 1) + 1, x.device),
            **arguments_of(self._case, self._choice_bias, choice),
        )  # fmt: skip
        return total, x, choice
