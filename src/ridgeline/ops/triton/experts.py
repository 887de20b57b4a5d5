"""Mixtures of experts in few launches: EXPERT_BLOCK, and MLP_BLOCK around it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ridgeline.ops import api
from ridgeline.ops.api import Linear, Op, Weights
from ridgeline.ops.reference.primitives import add
from ridgeline.ops.reference.recurrent import sigmoid_gate
from ridgeline.ops.stages import MLPBlock
from ridgeline.ops.triton.choice import sort_visits
from ridgeline.ops.triton.grouped import expert_product
from ridgeline.ops.triton.launch import Compiled, Counters, Launch
from ridgeline.ops.triton.packing import ROWS, Packed, refuses_format
from ridgeline.ops.triton.paged import power_above
from ridgeline.ops.triton.products import (
    APART_TOKENS,
    PEAK_BLOCK,
    ROUNDED_TOKENS,
    StoredProduct,
    low_of,
    pack_together,
    refuses_linear,
    refuses_together,
    round_rows,
    slices_of,
)
from ridgeline.ops.triton.routing import SORT_BLOCK, Choice, Router, Visits, refuses_route
from ridgeline.ops.triton.stages import Begin, Mlp, Stage, mlp_block, refuses_begin
from ridgeline.ops.triton.tilings import Block, tilings_of
from ridgeline.spec import MLP, XIELU, MoE, PairedMLP
from ridgeline.spec.mlp import ClampedSwiGLU, Ungated


@dataclass(frozen=True, slots=True)
class Stack:
    """The matrices of all experts: the gate and the up matrix of each, or one matrix.

    like: the first matrix; codes, scales and zero points: [experts, parts, ...], each part as in `Packed`.
    """

    like: Packed
    codes: Tensor
    scales: Tensor | None
    zero_points: Tensor | None
    bias: Tensor | None  # [experts, parts, rows]

    @property
    def parts(self) -> int:
        return self.codes.shape[1]


def stack(matrices: Sequence[Sequence[Linear]]) -> Stack:
    """Pack matrices of one shape and format, [experts][parts], one after the other into one piece of memory."""
    filled: dict[str, Any] = {"codes": None, "scales": None, "zero_points": None}
    for e, parts in enumerate(matrices):
        for p, linear in enumerate(parts):
            packed = pack_together([linear])
            for name in filled:
                part = getattr(packed, name)
                if part is not None:
                    if filled[name] is None:
                        filled[name] = part.new_empty((len(matrices), len(parts), *part.shape))
                    elif filled[name].dtype != part.dtype:  # scales of one matrix do not fit into 16 bits
                        filled[name] = filled[name].float()
                    filled[name][e, p] = part
    biases: list[Any] = [linear.bias for linear in chain.from_iterable(matrices)]
    bias = None if biases[0] is None else torch.stack(biases).view(len(matrices), len(matrices[0]), -1)
    return Stack(pack_together([matrices[0][0]]), **filled, bias=bias)


def _block(tokens: int, *, is_whole: bool) -> Block:
    """Return the block for a number of tokens of an expert. Tilings of GPUs are measured on products of one matrix."""
    return tilings_of().block("whole" if is_whole else "dense", "", tokens)


class Sums(NamedTuple):
    """Arrays of the sums of the second product; see `grouped.sum_visits`.

    weights: [T, k] of the results. shared: [T, width] is added to the sums, times sigmoid(gate [T, 1]) if given.
    """

    weights: Tensor
    shared: Tensor | None
    gate: Tensor | None
    out: Tensor


class Beside(NamedTuple):
    """A product of the shared expert in the launch of a product of experts: see `grouped.shared_rows`."""

    product: StoredProduct
    x: Tensor
    out: Tensor
    finish: tuple[Any, ...]


def arguments_of(beside: Beside | None) -> dict[str, Any]:
    """Return the arguments of a kernel that also multiplies with a matrix of the shared expert."""
    if beside is None:
        arrays = "", "_codes", "_scales", "_zeros", "_bias", "_out"
        numbers = "_rows", "_columns", "_stride", "_tiles", "_groups", "_splits"
        none = {f"beside{name}": None for name in arrays} | {f"beside{name}": 0 for name in numbers}
        return {**none, "beside_given": 1.0, "BESIDE": None, "FINISH": ("rows",)}
    (packed, bias, splits), x = beside.product.parts, beside.x
    t, input_scale = packed.tiling, packed.input_scale
    return {
        "beside": x, "beside_codes": packed.codes, "beside_scales": packed.scales, "beside_zeros": packed.zero_points,
        "beside_bias": bias, "beside_out": beside.out, "beside_rows": packed.rows, "beside_columns": packed.columns,
        "beside_stride": x.stride(0), "beside_tiles": packed.tiles, "beside_groups": packed.groups,
        "beside_splits": -(-packed.tiles // splits), "beside_given": 1.0 if input_scale is None else input_scale,
        "BESIDE": (
            beside.product.rounds is not None, t.kind, low_of(packed), packed.zero_points is not None,
            bias is not None, input_scale is not None, slices_of(packed), t.columns, t.halves, t.group, t.unit, splits,
        ), "FINISH": beside.finish,
    }  # fmt: skip


class Experts:
    """The stage EXPERT_BLOCK: the visits in the order of experts, and two products, of which one sums its results."""

    def __init__(self, case: MoE, weights: Weights, launch: Launch) -> None:
        self._case, self._launch, self._counters = case, launch, Counters()
        names = ("gate", "up") if case.gated else ("up",)
        self._up = stack(list(zip(*(weights.experts[name] for name in names), strict=True)))
        self._down = stack([(matrix,) for matrix in weights.experts["down"]])

    def __call__(
        self,
        x: Tensor,
        ids: Tensor,
        scores: Tensor,
        shared: Tensor | None = None,
        gate: Tensor | None = None,
        visits: Visits | None = None,
        mlp: Mlp | None = None,
    ) -> Tensor:
        """Return the sums [T, width]. shared: [T, width] is added to them, times sigmoid(gate [T, 1]) if given.

        visits: the sorted visits of `ids`; None: they are sorted here. mlp: a shared expert that `takes` allows, which
        is computed beside the others.
        """
        tokens, _ = ids.shape
        x = x if x.stride(-1) == 1 else x.contiguous()
        out = x.new_empty((tokens, self._down.like.rows))
        if not tokens:
            return out
        visits = self._sorted(ids) if visits is None else visits
        inner, up, down = x.new_empty((ids.numel(), self._up.like.rows)), None, None
        if mlp is not None:
            up = Beside(mlp.up, x, mlp.up.room(x, mlp.width), mlp.finish.how)
            down = Beside(mlp.down, up.out, torch.empty_like(out), ("rows",))
        self._multiply(self._up, x, inner, visits, None, up)
        results = x.new_empty((ids.numel(), out.shape[1]))
        self._multiply(self._down, inner, results, visits, Sums(scores.contiguous(), shared, gate, out), down)
        return out

    def takes(self, mlp: Mlp | None, tokens: int) -> bool:
        """Return whether products of few tokens with a shared expert can be programs in the launches of the others.

        Both have exact tokens, or both round them in the program that multiplies.
        """
        if mlp is None or tokens > APART_TOKENS:
            return False
        both = (self._up.like, mlp.up), (self._down.like, mlp.down)
        whole = [{like.format.activations == "int8", product.rounds is not None} for like, product in both]
        return all(len(kinds) == 1 for kinds in whole) and (True not in whole[0] | whole[1] or tokens <= ROUNDED_TOKENS)

    def unsorted(self, tokens: int, device: torch.device) -> Visits:
        """Return arrays for the visits of so many tokens."""
        experts, pairs = self._case.num_experts, tokens * self._case.num_experts_per_tok
        is_whole = self._up.like.format.activations == "int8"
        size = _block(-(-pairs // experts), is_whole=is_whole).tokens
        most = min(pairs, experts) + pairs // size  # no step has more blocks
        order, table, num_blocks = (torch.empty(n, dtype=torch.int32, device=device) for n in (pairs, (3, most), 1))
        return Visits(tokens, order, table, num_blocks, size)

    def _sorted(self, ids: Tensor) -> Visits:
        visits, experts = self.unsorted(len(ids), ids.device), self._case.num_experts
        self._launch(
            sort_visits, (experts,), Compiled(4),
            ids=ids.contiguous(), visits=visits.order, table=visits.table, num_blocks=visits.num_blocks,
            pairs=ids.numel(), most_blocks=visits.table.shape[1], EXPERTS=experts, BLOCK_T=visits.block_tokens,
            BLOCK_E=power_above(experts + 1), BLOCK_P=SORT_BLOCK,
        )  # fmt: skip
        return visits

    def _multiply(
        self, matrices: Stack, x: Tensor, out: Tensor, visits: Visits, sums: Sums | None, beside: Beside | None
    ) -> None:
        """Multiply: up, or down where results are summed."""
        packed, t, case = matrices.like, matrices.like.tiling, self._case
        is_whole, act = packed.format.activations == "int8", case.activation
        rounds = is_whole and visits.tokens <= ROUNDED_TOKENS
        x, token_scales = round_rows(packed, x, self._launch) if is_whole and not rounds else (x, None)
        input_scale = packed.input_scale
        block = _block(visits.block_tokens, is_whole=is_whole)
        # Codes of 4 bits beside tokens that are rounded here need so many registers that three stages spill some.
        compiled = Compiled(2, 2) if rounds and t.kind == "nibbles" else block.compiled
        clamped = act if isinstance(act, ClampedSwiGLU) else None
        blocks, programs, more = visits.table.shape[1], -(-packed.row_tiles * ROWS // block.rows), 0
        if beside is not None:
            more = -(-visits.tokens // visits.block_tokens)
            programs = max(programs, -(-beside.product.rows // block.rows))
        # Counters of a power of two of tokens serve all steps of fewer tokens.
        arrived = None if sums is None else self._counters(power_above(visits.tokens) * programs, x.device)
        weights, shared, gate, total = sums or (None, None, None, None)
        self._launch(
            expert_product, (blocks + more, programs), compiled,
            x=x, token_scales=token_scales, codes=matrices.codes, scales=matrices.scales,
            zero_points=matrices.zero_points, bias=matrices.bias, out=out, visits=visits.order, table=visits.table,
            num_blocks=visits.num_blocks, weights=weights, shared=shared, gate=gate, sums=total, arrived=arrived,
            gate_stride=1 if gate is None else gate.stride(0), most_blocks=blocks, rows=packed.rows,
            columns=packed.columns, x_stride=x.stride(0), tiles=packed.tiles, groups=packed.groups,
            row_tiles=packed.row_tiles,
            alpha=clamped.alpha if clamped else 0.0, limit=clamped.limit if clamped else 0.0,
            given=1.0 if input_scale is None else input_scale, CHOSEN=case.num_experts_per_tok, PARTS=matrices.parts,
            NAME="clamped" if clamped else act.activation if isinstance(act, Ungated) else act,
            IS_DOWN=sums is not None, WHOLE=is_whole, KIND=t.kind, LOW=low_of(packed),
            HAS_ZEROS=matrices.zero_points is not None, HAS_BIAS=matrices.bias is not None,
            SLICES=slices_of(packed), ROWS=ROWS, COLUMNS=t.columns, HALVES=t.halves,
            GROUP=t.group, UNIT=t.unit, ROUNDS=rounds, HAS_SCALE=input_scale is not None, BLOCK=PEAK_BLOCK,
            BLOCK_T=visits.block_tokens, BLOCK_R=block.rows, tokens=visits.tokens, **arguments_of(beside),
        )  # fmt: skip


def refuses_experts(experts: Mapping[str, Sequence[Linear]]) -> str | None:
    """Return why no kernel multiplies with the matrices of experts; None if one does."""
    for name, linears in experts.items():
        for linear in linears:
            if reason := linear.unfused or refuses_format(linear.format) or refuses_linear(linear):
                return f"{name} of an expert: {reason}"
    up = [*experts.get("gate", ()), *experts.get("up", ())]
    for linears in (up, list(experts.get("down", ()))):
        if linears and (reason := refuses_together(linears)):
            return f"among matrices of experts, {reason}"
        if len({getattr(linear.data, "dtype", None) for linear in linears}) > 1:
            return "among matrices of experts, types differ"
    return None


class _Routed:
    """The experts that a router chooses, with the projections into and out of their own space if there are some."""

    def __init__(self, case: MoE, weights: Weights, launch: Launch) -> None:
        self._experts = Experts(case, weights, launch)
        inside = ("latent_in", "latent_out") if case.latent_size else ()
        self._latent = [StoredProduct([weights.linears[n]], launch) for n in inside]

    def unsorted(self, tokens: int, device: torch.device) -> Visits:
        return self._experts.unsorted(tokens, device)

    def __call__(self, x: Tensor, choice: Choice, mlp: Mlp | None) -> Tensor:
        """Return the sums of the experts and of a shared one."""
        ids, scores, gate, visits = choice
        if not self._latent and visits is not None and self._experts.takes(mlp, len(x)):
            return self._experts(x, ids, scores, None, gate, visits, mlp)
        shared = None if mlp is None else mlp(x)
        if not self._latent:
            return self._experts(x, ids, scores, shared, gate, visits)
        into, out_of = self._latent
        out = out_of(self._experts(into(x), ids, scores, visits=visits))
        if shared is None:
            return out
        return add(out, shared if gate is None else sigmoid_gate(shared, gate), 1.0)


def moe_block(case: MLPBlock, weights: Weights, launch: Launch) -> Callable[..., Any]:
    moe: Any = case.mlp
    routed = _Routed(moe, weights, launch)
    router = Router(moe, Begin(case, weights, launch), weights, routed.unsorted, launch)
    shared = Mlp(moe.shared, weights.under("shared."), launch) if moe.shared else None

    def stage(residual: Tensor, delta: Tensor | None) -> tuple[Tensor, Tensor]:
        total, x, choice = router(residual, delta)
        return total, routed(x, choice, shared)

    return stage


def refuses_block(case: MLPBlock) -> str | None:
    """Return why no kernel serves an MLP or experts; None if one does."""
    if isinstance(case.mlp, PairedMLP):
        return "no kernel serves experts beside a dense MLP"
    if case.scales_gate:
        return "no kernel multiplies a gate before its activation"
    if isinstance(case.mlp, MoE) and case.mlp.shared_scale != 1.0:
        return "no kernel multiplies the result of the shared expert"
    if isinstance(case.mlp, MLP) and isinstance(case.mlp.activation, XIELU):
        return "no kernel has activations with learned numbers"
    return (_refuses_moe(case.mlp) if isinstance(case.mlp, MoE) else None) or refuses_begin(case)


def _refuses_moe(case: MoE | None) -> str | None:
    """Return why no kernel chooses and runs experts; None if one does, and without a case if one serves some."""
    if case is not None and case.weighs_inputs:
        return "no kernel multiplies the inputs of experts with their scores"
    return refuses_route(case)


def block(case: MLPBlock, weights: Weights, launch: Launch) -> Callable[..., Any]:
    """Return MLP_BLOCK for either kind."""
    return (moe_block if isinstance(case.mlp, MoE) else mlp_block)(case, weights, launch)


STAGES: Mapping[Op[Any], Stage] = {
    api.MLP_BLOCK: Stage(refuses_block, block),
    api.EXPERT_BLOCK: Stage(_refuses_moe, Experts),
}
