"""The cases of stages, and the definition of each stage as a composition of primitives."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

from ridgeline.ops import api
from ridgeline.ops.api import Array, Op, PageTarget, QuantizedMatrix, Rotary, Weights
from ridgeline.ops.codes import check_codes
from ridgeline.ops.indexed import indexed_input
from ridgeline.ops.parts import Ops, follow_segments, recurrent_body
from ridgeline.ops.recurrent import bind_mixer
from ridgeline.spec import (
    MLP,
    XIELU,
    Attention,
    ChannelMixer,
    GatedMLP,
    LatentAttention,
    MoE,
    Norm,
    PairedMLP,
    RecurrentMixer,
    RMSNorm,
)
from ridgeline.spec.quant import Format


@dataclass(frozen=True, slots=True)
class AttentionInput:
    """residual += scale * delta; x = norm(residual); q, k = rope(qk_norm(linear(x))); v, gate = linear(x).

    Where values are keys, v is the result of k's matrix. Values have a norm without weights where the mixer says so.
    """

    mixer: Attention
    norm: Norm | None
    residual_scale: float


@dataclass(frozen=True, slots=True)
class LatentInput:
    """residual += scale * delta; x = norm(residual); q = rope(q x), or rope(q_b norm(q_a x)); c, k = kv_a x; the state
    gets [latent_scale norm(c), rope(k)].

    reader: the backend of PAGED_LATENT_ATTENTION. If it also serves this stage, queries may have a form of its own.
    """

    mixer: LatentAttention
    norm: Norm | None
    residual_scale: float
    reader: str | None = None


@dataclass(frozen=True, slots=True)
class RecurrentBlock:
    """residual += scale * delta; delta, states = mixer(norm(residual), states), along each sequence."""

    mixer: RecurrentMixer
    norm: Norm | None
    residual_scale: float


@dataclass(frozen=True, slots=True)
class MLPBlock:
    """residual += scale * delta; delta = mlp(norm(residual))."""

    mlp: ChannelMixer
    norm: Norm | None
    residual_scale: float

    @property
    def scales_gate(self) -> bool:
        """Return whether a gate is multiplied by a factor before its activation."""
        dense = (self.mlp, self.mlp.shared, self.mlp.dense if isinstance(self.mlp, PairedMLP) else None)
        return any(isinstance(mlp, GatedMLP) and mlp.gate_scale != 1.0 for mlp in dense)


@dataclass(frozen=True, slots=True)
class Head:
    """residual += scale * delta; logits = softcap(logit_scale * linear(norm(residual[rows])))."""

    norm: Norm | None
    residual_scale: float
    logit_scale: float
    logit_softcap: float | None


def compose(op: Op[Any], case: object, weights: Weights, table: Ops) -> Callable[..., Any]:
    """Return a stage as the composition that defines it."""
    if op is not api.PRODUCT:  # preparing a matrix builds its PRODUCT
        for linear in weights.linears.values():
            linear.prepare()
    return _COMPOSITIONS[op.name](case, weights, table)


def _norm(norm: Norm | None, name: str, weights: Weights, table: Ops) -> Callable[[Array], Array]:
    if norm is None:
        return lambda x: x
    kernel = table.primitive(api.NORM, norm)
    weight, bias = weights.arrays[f"{name}.weight"], weights.vector(f"{name}.bias")
    return lambda x: kernel(x, weight, bias)


def _accumulate(scale: float, table: Ops) -> Callable[[Array, Array | None], Array]:
    add = table.primitive(api.ADD)
    return lambda residual, delta: residual if delta is None else add(residual, delta, scale)


def _attention_input(case: AttentionInput, weights: Weights, table: Ops) -> Callable[..., Any]:
    m = case.mixer
    accumulate = _accumulate(case.residual_scale, table)
    norm = _norm(case.norm, "norm", weights, table)
    split, linears, values = table.primitive(api.SPLIT_HEADS), weights.linears, _value_norm(m, table)
    queries = _heads(m, m.num_heads, "q", weights, table)
    keys = _heads(m, m.num_kv_heads, "k", weights, table)
    gate, clip = _gate(m, weights), _clip(m, table)

    def run(
        residual: Array, delta: Array | None, rotary: Rotary | None, target: PageTarget | None = None
    ) -> tuple[Array, Array, Array | None, Array, Array]:
        residual = accumulate(residual, delta)
        x = norm(residual)
        k = clip(linears["k"].apply(x))
        v = k if m.values_are_keys else clip(linears["v"].apply(x))
        values_ = values(split(v, m.num_kv_heads))
        return residual, queries(clip(linears["q"].apply(x)), rotary), gate(x), keys(k, rotary), values_

    return run


def _clip(m: Attention, table: Ops) -> Callable[[Array], Array]:
    """Return the limit on queries, keys and values."""
    if (limit := m.clip) is None:
        return lambda x: x
    clamp = table.primitive(api.CLAMP)
    return lambda x: clamp(x, limit)


def _value_norm(m: Attention, table: Ops) -> Callable[[Array], Array]:
    """Return the norm of values [T, K, D], which has no weights."""
    if m.value_eps is None:
        return lambda v: v
    kernel, zeros = table.primitive(api.NORM, RMSNorm(m.value_eps, offset=1.0)), table.memory.zeros((m.head_dim,))
    return lambda v: kernel(v, zeros, None)


def _heads(m: Attention, num: int, name: str, weights: Weights, table: Ops) -> Callable[[Array, Rotary | None], Array]:
    """Return a function from projections [T, num * D] to queries or keys [T, num, D]: normalized and rotated."""
    split = table.primitive(api.SPLIT_HEADS)
    normalize = _norm(m.qk_norm, f"{name}_norm", weights, table)
    rope = table.primitive(api.ROPE, m.rope) if m.rope else None

    def after(x: Array, rotary: Rotary | None) -> Array:
        return normalize(rope(split(x, num), rotary) if rope and rotary else split(x, num))

    def run(x: Array, rotary: Rotary | None) -> Array:
        x = split(normalize(x), num) if m.qk_norm_over == "all_heads" else normalize(split(x, num))
        return rope(x, rotary) if rope and rotary else x

    return after if m.norms_rotated else run


def _gate(m: Attention, weights: Weights) -> Callable[[Array], Array | None]:
    return weights.linears["out_gate"].apply if m.out_gate else lambda x: None


def _query_input(case: AttentionInput, weights: Weights, table: Ops) -> Callable[..., Any]:
    m = case.mixer
    accumulate = _accumulate(case.residual_scale, table)
    norm = _norm(case.norm, "norm", weights, table)
    q_linear, queries, gate = weights.linears["q"], _heads(m, m.num_heads, "q", weights, table), _gate(m, weights)
    clip = _clip(m, table)

    def run(residual: Array, delta: Array | None, rotary: Rotary | None) -> tuple[Array, Array, Array | None]:
        residual = accumulate(residual, delta)
        x = norm(residual)
        return residual, queries(clip(q_linear.apply(x)), rotary), gate(x)

    return run


def _latent_input(case: LatentInput, weights: Weights, table: Ops) -> Callable[..., Any]:
    m = case.mixer
    accumulate = _accumulate(case.residual_scale, table)
    norm = _norm(case.norm, "norm", weights, table)
    latent_norm, scale = _norm(m.latent_norm, "kv_a_norm", weights, table), table.primitive(api.SCALE)
    split, cut, join = table.primitive(api.SPLIT_HEADS), table.primitive(api.CUT), table.primitive(api.JOIN)
    rope = table.primitive(api.ROPE, m.rope) if m.rope else None
    queries, kv_a = _latent_queries(m, weights, table), weights.linears["kv_a"]

    def rotate(x: Array, rotary: Rotary | None) -> Array:
        return rope(x, rotary) if rope and rotary else x

    def run(
        residual: Array, delta: Array | None, rotary: Rotary | None, target: PageTarget | None = None
    ) -> tuple[Array, Array, Array]:
        residual = accumulate(residual, delta)
        x = norm(residual)
        q, kept = split(queries(x), m.num_heads), split(kv_a.apply(x), 1)
        still, rotated = cut(q, 0, m.qk_nope_head_dim), cut(q, m.qk_nope_head_dim, m.qk_head_dim)
        latent, key = cut(kept, 0, m.kv_lora_rank), cut(kept, m.kv_lora_rank, m.row)
        latent = latent_norm(latent)
        latent = latent if m.latent_scale == 1.0 else scale(latent, m.latent_scale)
        return residual, join(still, rotate(rotated, rotary)), join(latent, rotate(key, rotary))

    return run


def _latent_queries(m: LatentAttention, weights: Weights, table: Ops) -> Callable[[Array], Array]:
    if m.q_lora_rank is None:
        return weights.linears["q"].apply
    norm = _norm(m.latent_norm, "q_a_norm", weights, table)
    q_a, q_b = weights.linears["q_a"], weights.linears["q_b"]
    return lambda x: q_b.apply(norm(q_a.apply(x)))


def _attention_output(case: Attention | LatentAttention, weights: Weights, table: Ops) -> Callable[..., Any]:
    o, bias = weights.linears["o"], weights.vector("gate_bias")
    if not isinstance(case, Attention) or case.has_usual_gate:
        usual = table.primitive(api.SIGMOID_GATE)
        return lambda attended, gate: o.apply(attended if gate is None else usual(attended, gate))
    gated = table.primitive(api.ATTENTION_GATE, case)
    return lambda attended, gate: o.apply(gated(attended, gate, bias))


def _recurrent_block(case: RecurrentBlock, weights: Weights, table: Ops) -> Callable[..., Any]:
    accumulate = _accumulate(case.residual_scale, table)
    norm = _norm(case.norm, "norm", weights, table)
    take, gather = table.primitive(api.TAKE), table.primitive(api.GATHER)

    def first(residual: Array, delta: Array | None) -> tuple[Array, Array]:
        residual = accumulate(residual, delta)
        return residual, norm(residual)

    parts = bind_mixer(case.mixer, weights, table)
    return recurrent_body(first, parts, follow_segments(parts.along, take, gather), take)


def _mlp_block(case: MLPBlock, weights: Weights, table: Ops) -> Callable[..., Any]:
    accumulate = _accumulate(case.residual_scale, table)
    norm = _norm(case.norm, "norm", weights, table)
    branch = _channel_mixer(case.mlp, norm, weights, table)

    def run(residual: Array, delta: Array | None) -> tuple[Array, Array]:
        residual = accumulate(residual, delta)
        return residual, branch(residual)

    return run


def _channel_mixer(
    case: ChannelMixer, norm: Callable[[Array], Array], weights: Weights, table: Ops
) -> Callable[[Array], Array]:
    """Return a function of the residual stream [T, width]. norm: the layer's own norm."""
    if isinstance(case, PairedMLP):
        return _paired(case, norm, weights, table)
    mlp = _moe(case, weights, table) if isinstance(case, MoE) else _mlp(case, weights, table)
    return lambda x: mlp(norm(x))


def _paired(case: PairedMLP, norm: Callable[[Array], Array], weights: Weights, table: Ops) -> Callable[[Array], Array]:
    """Return a function of the residual stream [T, width]. norm: the layer's own norm, of the dense MLP's input."""
    add, dense = table.primitive(api.ADD), _mlp(case.dense, weights.under("dense."), table)
    names = "router_norm", "experts_norm", "dense_post_norm", "experts_post_norm"
    router_norm, experts_norm, dense_post, experts_post = (_norm(case.norm, n, weights, table) for n in names)
    scale, router = table.primitive(api.SCALE), weights.linears["router"]
    route, run_experts = _routed(case.moe, weights, table)

    def run(x: Array) -> Array:
        logits = router.apply(scale(router_norm(x), x.shape[-1] ** -0.5))
        routed = run_experts(experts_norm(x), *route(logits))
        return add(dense_post(dense(norm(x))), experts_post(routed), 1.0)

    return run


_LEARNED = ("alpha_p", "alpha_n")


def _mlp(case: ChannelMixer, weights: Weights, table: Ops) -> Callable[[Array], Array]:
    up, down = weights.linears["up"], weights.linears["down"]
    if isinstance(case, MLP) and isinstance(case.activation, XIELU):
        bend, own = table.primitive(api.XIELU, case.activation), [weights.arrays[f"xielu.{n}"] for n in _LEARNED]
        return lambda x: down.apply(bend(up.apply(x), *own))
    act = table.primitive(api.ACTIVATION, case)
    if isinstance(case, GatedMLP):
        gate, scale, factor = weights.linears["gate"], table.primitive(api.SCALE), case.gate_scale
        if factor == 1.0:
            return lambda x: down.apply(act(gate.apply(x), up.apply(x)))
        return lambda x: down.apply(act(scale(gate.apply(x), factor), up.apply(x)))
    return lambda x: down.apply(act(up.apply(x)))


def _moe(case: MoE, weights: Weights, table: Ops) -> Callable[[Array], Array]:
    router, (route, experts) = weights.linears["router"].apply, _routed(case, weights, table)
    latent = (weights.linears["latent_in"], weights.linears["latent_out"]) if case.latent_size else None

    def run(x: Array) -> Array:
        ids, scores = route(router(x))
        if latent is None:
            return experts(x, ids, scores)
        into, out = latent
        return out.apply(experts(into.apply(x), ids, scores))

    if case.shared is None:
        return run
    shared, add = _mlp(case.shared, weights.under("shared."), table), table.primitive(api.ADD)
    factor = case.shared_scale
    if not case.shared_gate:
        return lambda x: add(run(x), shared(x), factor)
    shared_gate, sigmoid_gate = weights.linears["shared_gate"], table.primitive(api.SIGMOID_GATE)
    return lambda x: add(run(x), sigmoid_gate(shared(x), shared_gate.apply(x)), factor)


def _routed(
    case: MoE, weights: Weights, table: Ops
) -> tuple[Callable[[Array], tuple[Array, Array]], Callable[[Array, Array, Array], Array]]:
    """Return the choice of experts, a function of the router's logits, and EXPERT_BLOCK."""
    route, own = table.primitive(api.ROUTE, case), [weights.vector("choice.bias")]
    if case.expert_scale:
        own.append(weights.arrays["expert_scale.weight"])
    experts = table.stage(api.EXPERT_BLOCK, case, Weights({}, {}, weights.experts))
    return (lambda logits: route(logits, *own)), experts


def _expert_block(case: MoE, weights: Weights, table: Ops) -> Callable[..., Array]:
    for linear in chain.from_iterable(weights.experts.values()):
        linear.prepare()
    experts, act = table.primitive(api.EXPERTS, case), table.primitive(api.ACTIVATION, case)
    gate, up, down = (weights.experts.get(name) for name in ("gate", "up", "down"))
    assert up is not None and down is not None

    def expert(e: int, x: Array) -> Array:
        raised = up[e].apply(x)
        return down[e].apply(act(raised) if gate is None else act(gate[e].apply(x), raised))

    return lambda x, ids, scores: experts(x, ids, scores, expert)


class _PlainProduct:
    """A matrix in the type of the checkpoint."""

    def __init__(self, case: Format, weights: Weights, table: Ops) -> None:
        matrix = weights.linears["matrix"]
        assert not isinstance(matrix.data, QuantizedMatrix)
        self._weight, self._bias, self._memory = matrix.data, matrix.bias, table.memory
        self._linear = table.primitive(api.LINEAR)
        self._round = table.primitive(api.ROUND_BF16) if case.activations == "bf16" else None

    def __call__(self, x: Array) -> Array:
        return self._linear(x if self._round is None else self._round(x), self._weight, self._bias)

    def dequantize(self) -> Array:
        return self._memory.widen(self._weight)


class _QuantizedProduct:
    """A matrix as codes and scales. Floats are rounded here, codes are used as they are."""

    def __init__(self, case: Format, weights: Weights, table: Ops) -> None:
        matrix = weights.linears["matrix"]
        if isinstance(matrix.data, QuantizedMatrix):
            check_codes(matrix.data, table.memory)
            self._matrix = matrix.data
        else:
            self._matrix = table.primitive(api.QUANTIZE, case)(matrix.data)
        self._bias = matrix.bias
        self._linear = table.primitive(api.QUANTIZED_LINEAR, case)
        self._dequantize = table.primitive(api.DEQUANTIZE, case)

    def __call__(self, x: Array) -> Array:
        return self._linear(x, self._matrix, self._bias)

    def dequantize(self) -> Array:
        return self._dequantize(self._matrix)


def _product(case: Format, weights: Weights, table: Ops) -> api.Product:
    return (_QuantizedProduct if case.is_lossy else _PlainProduct)(case, weights, table)


class _Head:
    """The last norm and the output head; an `ops.api.HeadStage`."""

    rows = None

    def __init__(self, case: Head, weights: Weights, table: Ops) -> None:
        self._case = case
        self._accumulate = _accumulate(case.residual_scale, table)
        self._norm = _norm(case.norm, "norm", weights, table)
        self._take, self._scale = table.primitive(api.TAKE), table.primitive(api.SCALE)
        self._softcap = table.primitive(api.SOFTCAP)
        self._matrix = weights.linears["head"]

    def __call__(self, residual: Array, delta: Array | None, rows: Array | None) -> Array:
        if rows is not None:
            residual, delta = self._take(residual, rows), None if delta is None else self._take(delta, rows)
        return self.project(self._norm(self._accumulate(residual, delta)))

    def project(self, x: Array) -> Array:
        logits, case = self._matrix.apply(x), self._case
        if case.logit_scale != 1.0:
            logits = self._scale(logits, case.logit_scale)
        return self._softcap(logits, case.logit_softcap) if case.logit_softcap else logits


_COMPOSITIONS: Mapping[str, Callable[[Any, Weights, Ops], Callable[..., Any]]] = {
    api.ATTENTION_INPUT.name: _attention_input,
    api.QUERY_INPUT.name: _query_input,
    api.LATENT_INPUT.name: _latent_input,
    api.INDEXED_INPUT.name: indexed_input,
    api.ATTENTION_OUTPUT.name: _attention_output,
    api.RECURRENT_BLOCK.name: _recurrent_block,
    api.PRODUCT.name: _product,
    api.EXPERT_BLOCK.name: _expert_block,
    api.MLP_BLOCK.name: _mlp_block,
    api.HEAD.name: _Head,
}
