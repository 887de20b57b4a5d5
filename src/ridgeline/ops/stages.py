"""Stages: their cases, and their definition as compositions of primitives."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from ridgeline.ops import api
from ridgeline.ops.api import Array, Op, Rotary, Weights
from ridgeline.spec import Attention, ChannelMixer, GatedMLP, MoE, Norm

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class AttentionInput:
    """residual += scale * delta; q, k, v = rope(qk_norm(linear(norm(residual))))."""

    mixer: Attention
    norm: Norm | None
    residual_scale: float


@dataclass(frozen=True, slots=True)
class MLPBlock:
    """residual += scale * delta; delta = mlp(norm(residual))."""

    mlp: ChannelMixer
    norm: Norm | None
    residual_scale: float


@dataclass(frozen=True, slots=True)
class Head:
    """residual += scale * delta; logits = softcap(logit_scale * linear(norm(residual[rows])))."""

    norm: Norm
    residual_scale: float
    logit_scale: float
    logit_softcap: float | None


class Primitives(Protocol):
    """What a composition needs of the table."""

    def primitive(self, op: Op[F], case: object = None) -> F: ...


def compose(op: Op[Any], case: object, weights: Weights, table: Primitives) -> Callable[..., Any]:
    """The definition of a stage."""
    return _COMPOSITIONS[op.name](case, weights, table)


def _norm(norm: Norm | None, name: str, weights: Weights, table: Primitives) -> Callable[[Array], Array]:
    if norm is None:
        return lambda x: x
    kernel = table.primitive(api.NORM, norm)
    weight, bias = weights.arrays[f"{name}.weight"], weights.vector(f"{name}.bias")
    return lambda x: kernel(x, weight, bias)


def _accumulate(scale: float, table: Primitives) -> Callable[[Array, Array | None], Array]:
    add = table.primitive(api.ADD)
    return lambda residual, delta: residual if delta is None else add(residual, delta, scale)


def _attention_input(case: AttentionInput, weights: Weights, table: Primitives) -> Callable[..., Any]:
    m = case.mixer
    accumulate = _accumulate(case.residual_scale, table)
    norm = _norm(case.norm, "norm", weights, table)
    split = table.primitive(api.SPLIT_HEADS)
    queries = _heads(m, m.num_heads, "q", weights, table)
    keys = _heads(m, m.num_kv_heads, "k", weights, table)
    v_linear = weights.linears["v"]

    def run(residual: Array, delta: Array | None, rotary: Rotary | None) -> tuple[Array, Array, Array, Array]:
        residual = accumulate(residual, delta)
        x = norm(residual)
        return residual, queries(x, rotary), keys(x, rotary), split(v_linear.apply(x), m.num_kv_heads)

    return run


def _heads(
    m: Attention, num: int, name: str, weights: Weights, table: Primitives
) -> Callable[[Array, Rotary | None], Array]:
    """x [T, width] -> the queries or keys [T, num, D]: projected, normalised, turned."""
    linear, split = weights.linears[name], table.primitive(api.SPLIT_HEADS)
    normalise = _norm(m.qk_norm, f"{name}_norm", weights, table)
    rope = table.primitive(api.ROPE, m.rope) if m.rope else None

    def run(x: Array, rotary: Rotary | None) -> Array:
        x = linear.apply(x)
        x = split(normalise(x), num) if m.qk_norm_over == "all_heads" else normalise(split(x, num))
        return rope(x, rotary) if rope and rotary else x

    return run


def _query_input(case: AttentionInput, weights: Weights, table: Primitives) -> Callable[..., Any]:
    m = case.mixer
    accumulate = _accumulate(case.residual_scale, table)
    norm = _norm(case.norm, "norm", weights, table)
    queries = _heads(m, m.num_heads, "q", weights, table)

    def run(residual: Array, delta: Array | None, rotary: Rotary | None) -> tuple[Array, Array]:
        residual = accumulate(residual, delta)
        return residual, queries(norm(residual), rotary)

    return run


def _attention_output(case: Attention, weights: Weights, table: Primitives) -> Callable[..., Any]:
    return weights.linears["o"].apply


def _mlp_block(case: MLPBlock, weights: Weights, table: Primitives) -> Callable[..., Any]:
    accumulate = _accumulate(case.residual_scale, table)
    norm = _norm(case.norm, "norm", weights, table)
    mlp = _moe(case.mlp, weights, table) if isinstance(case.mlp, MoE) else _mlp(case.mlp, weights, table)

    def run(residual: Array, delta: Array | None) -> tuple[Array, Array]:
        residual = accumulate(residual, delta)
        return residual, mlp(norm(residual))

    return run


def _mlp(case: ChannelMixer, weights: Weights, table: Primitives) -> Callable[[Array], Array]:
    act = table.primitive(api.ACTIVATION, case)
    up, down = weights.linears["up"], weights.linears["down"]
    if isinstance(case, GatedMLP):
        gate = weights.linears["gate"]
        return lambda x: down.apply(act(gate.apply(x), up.apply(x)))
    return lambda x: down.apply(act(up.apply(x)))


def _moe(case: MoE, weights: Weights, table: Primitives) -> Callable[[Array], Array]:
    route, experts = table.primitive(api.ROUTE, case), table.primitive(api.EXPERTS, case)
    router = weights.linears["router"]
    gate, up, down = (weights.arrays[f"experts.{n}.weight"] for n in ("gate", "up", "down"))
    biases: api.ExpertBiases | None = None
    if case.bias:
        biases = (
            weights.arrays["experts.gate.bias"],
            weights.arrays["experts.up.bias"],
            weights.arrays["experts.down.bias"],
        )

    def run(x: Array) -> Array:
        ids, scores = route(router.apply(x))
        return experts(x, ids, scores, gate, up, down, biases)

    return run


def _head(case: Head, weights: Weights, table: Primitives) -> Callable[..., Any]:
    accumulate = _accumulate(case.residual_scale, table)
    norm = _norm(case.norm, "norm", weights, table)
    take, scale = table.primitive(api.TAKE), table.primitive(api.SCALE)
    softcap = table.primitive(api.SOFTCAP)
    head = weights.linears["head"]

    def run(residual: Array, delta: Array | None, rows: Array | None) -> Array:
        if rows is not None:
            residual, delta = take(residual, rows), None if delta is None else take(delta, rows)
        logits = head.apply(norm(accumulate(residual, delta)))
        if case.logit_scale != 1.0:
            logits = scale(logits, case.logit_scale)
        return softcap(logits, case.logit_softcap) if case.logit_softcap else logits

    return run


_COMPOSITIONS: Mapping[str, Callable[[Any, Weights, Primitives], Callable[..., Any]]] = {
    api.ATTENTION_INPUT.name: _attention_input,
    api.QUERY_INPUT.name: _query_input,
    api.ATTENTION_OUTPUT.name: _attention_output,
    api.MLP_BLOCK.name: _mlp_block,
    api.HEAD.name: _head,
}
