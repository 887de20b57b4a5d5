"""Stages as one kernel each: the residual sum, the norm, the product and the operation after it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from ridgeline._kernels import Heads, Matrix, Mlp, Norm, Pool, Projection, rotate
from ridgeline._kernels import scale as copy
from ridgeline.ops import api
from ridgeline.ops.api import Op, PageTarget, Rotary, Weights
from ridgeline.ops.cpu.coded import order_of, packing_key
from ridgeline.ops.cpu.elementwise import add, scale, sigmoid_gate
from ridgeline.ops.cpu.experts import build_experts, experts, refuses_inputs, refuses_route, route
from ridgeline.ops.cpu.kernel import empty, never
from ridgeline.ops.cpu.linear import Product, activation_of, rows_of
from ridgeline.ops.cpu.matrices import Floats, build_matrix, build_norm, refuses_format
from ridgeline.ops.stages import AttentionInput, Head, MLPBlock
from ridgeline.spec import (
    MLP,
    XIELU,
    Attention,
    GatedMLP,
    LatentAttention,
    LayerNorm,
    MoE,
    PairedMLP,
    RMSNorm,
    ShortcutMLP,
)

PANEL = 32  # a head of this many rows needs no rotation or norm of its own
Ints = np.ndarray[Any, np.dtype[np.int64]]


class Stage(NamedTuple):
    """A stage: why a case has no kernel, or None; and a function that makes the kernel of a case with its weights."""

    refuses: Callable[[Any], str | None]
    make: Callable[[Any, Weights, Pool], Callable[..., Any]]


def attention_input(case: AttentionInput, weights: Weights, pool: Pool) -> Callable[..., Any]:
    m = case.mixer
    if m.values_are_keys:
        return _shared_input(case, weights, pool)
    run, q, kv = _heads(case, weights, pool, "qkv"), (m.num_heads, m.head_dim), (m.num_kv_heads, m.head_dim)
    gate, value_norm = _gate(case, weights, pool), _value_norm(m)

    def stage(
        residual: Floats, delta: Floats | None, rotary: Rotary | None, target: PageTarget | None = None
    ) -> tuple[Floats, Floats, Floats | None, Floats, Floats]:
        outs: list[Floats] = [empty(pool, len(residual), *shape) for shape in (q, kv, kv)]
        total = run(residual, delta, rotary, outs)
        if value_norm:
            value_norm(pool, rows_of(outs[2]), rows_of(outs[2]))
        return total, outs[0], gate(residual, delta), outs[1], outs[2]

    return stage


def _shared_input(case: AttentionInput, weights: Weights, pool: Pool) -> Callable[..., Any]:
    """Build the input of attention whose values are the keys before their norm and rotation."""
    m = case.mixer
    run, q, kv = _heads(case, weights, pool, "qk", 1), (m.num_heads, m.head_dim), (m.num_kv_heads, m.head_dim)
    gate, value_norm = _gate(case, weights, pool), _value_norm(m)
    key_norm = norm_of(m.qk_norm, "k_norm", weights)

    def stage(
        residual: Floats, delta: Floats | None, rotary: Rotary | None, target: PageTarget | None = None
    ) -> tuple[Floats, Floats, Floats | None, Floats, Floats]:
        queries, keys, values = (empty(pool, len(residual), *shape) for shape in (q, kv, kv))
        total = run(residual, delta, rotary, [queries, keys])
        if value_norm:
            value_norm(pool, rows_of(keys), rows_of(values))
        else:
            copy(pool, rows_of(keys), 1.0, rows_of(values))
        if key_norm:
            key_norm(pool, rows_of(keys), rows_of(keys))
        if m.rope and rotary:
            cos, sin = np.asarray(rotary.cos), np.asarray(rotary.sin)
            rotate(pool, keys, m.head_dim, 0, m.rope.dim, m.rope.interleaved, cos, sin)
        return total, queries, gate(residual, delta), keys, values

    return stage


def _value_norm(m: Attention) -> Norm | None:
    """Return the norm of values, which has no weights, or None."""
    return None if m.value_eps is None else Norm("rms", m.value_eps, np.ones(m.head_dim, np.float32), None)


def refuses_heads(case: AttentionInput) -> str | None:
    """Return why no kernel serves the input of attention; None if one does."""
    if case.mixer.clip is not None:
        return "no kernel limits queries, keys and values"
    return "no kernel rotates heads before their norm" if case.mixer.norms_rotated else None


def refuses_mlp(case: MLPBlock) -> str | None:
    """Return why no kernel serves an MLP or experts; None if one does."""
    mlp = case.mlp
    if isinstance(mlp, MLP) and isinstance(mlp.activation, XIELU):
        return "no kernel has activations with learned numbers"
    if case.scales_gate:
        return "no kernel multiplies a gate before its activation"
    if isinstance(mlp, MoE) and mlp.shared_scale != 1.0:
        return "no kernel multiplies the result of the shared expert"
    if isinstance(mlp, MoE) and mlp.identity:
        return "experts whose result is their input read it after the norm, which is a kernel of its own"
    if isinstance(mlp, ShortcutMLP):
        return "the two parts of a shortcut are stages of their own"
    if isinstance(mlp, MLP | GatedMLP):
        return None
    moe = mlp.moe if isinstance(mlp, PairedMLP) else mlp
    return refuses_inputs(moe) or refuses_route(moe)


def refuses_output(case: Attention | LatentAttention | None) -> str | None:
    """Return why no kernel gates the results of attention before their product; None if one does."""
    usual = not isinstance(case, Attention) or case.has_usual_gate
    return (
        None if usual else "no kernel has a gate of each head, with a bias of heads or with softplus before the product"
    )


def query_input(case: AttentionInput, weights: Weights, pool: Pool) -> Callable[..., Any]:
    m = case.mixer
    run, gate = _heads(case, weights, pool, "q"), _gate(case, weights, pool)

    def stage(residual: Floats, delta: Floats | None, rotary: Rotary | None) -> tuple[Floats, Floats, Floats | None]:
        q = empty(pool, len(residual), m.num_heads, m.head_dim)
        return run(residual, delta, rotary, [q]), q, gate(residual, delta)

    return stage


def _gate(case: AttentionInput, weights: Weights, pool: Pool) -> Callable[[Floats, Floats | None], Floats | None]:
    """Return a function that computes the output gate of attention; it returns None for a mixer without one."""
    if not case.mixer.out_gate:
        return lambda residual, delta: None
    matrix = _matrix(weights, ("out_gate",), pool)
    kernel = Projection(pool, matrix, norm_of(case.norm, "norm", weights), case.residual_scale, 1.0, 0.0)

    def gate(residual: Floats, delta: Floats | None) -> Floats:
        out = empty(pool, len(residual), matrix.rows)
        kernel(residual, delta, None, None, out)
        return out

    return gate


def _heads(
    case: AttentionInput, weights: Weights, pool: Pool, names: str, num_rotated: int = 2
) -> Callable[[Floats, Floats | None, Rotary | None, list[Floats]], Floats]:
    """Return a function that writes the projections `names` into outputs and returns the residual.

    num_rotated: how many of them, from the first on, are normalized and rotated at most.
    """
    m = case.mixer
    rotated = names.replace("v", "")[:num_rotated]
    norms = [norm_of(m.qk_norm, f"{name}_norm", weights) for name in rotated] if m.qk_norm else []
    rope_dim, pairs = (m.rope.dim, m.rope.interleaved) if m.rope else (0, False)
    kernel = Heads(
        pool, _matrix(weights, names, pool), norm_of(case.norm, "norm", weights), case.residual_scale,
        m.head_dim, rope_dim, pairs, m.qk_norm_over == "all_heads", [n for n in norms if n], len(rotated),
    )  # fmt: skip

    def run(residual: Floats, delta: Floats | None, rotary: Rotary | None, outs: list[Floats]) -> Floats:
        total = _sum_of(pool, residual, delta)
        cos: Any = rotary.cos if rotary and rope_dim else None
        sin: Any = rotary.sin if rotary and rope_dim else None
        kernel(residual, delta, total, cos, sin, outs)
        return residual if total is None else total

    return run


def attention_output(
    case: Attention | LatentAttention, weights: Weights, pool: Pool
) -> Callable[[Floats, Floats | None], Floats]:
    matrix = _matrix(weights, "o", pool)
    kernel, gated = Projection(pool, matrix, None, 1.0, 1.0, 0.0), sigmoid_gate(None, pool)

    def stage(attended: Floats, gate: Floats | None) -> Floats:
        if gate is not None:
            attended = gated(attended, gate)
        out = empty(pool, len(attended), matrix.rows)
        kernel(attended, None, None, None, out)
        return out

    return stage


def mlp_block(case: MLPBlock, weights: Weights, pool: Pool) -> Callable[..., Any]:
    if isinstance(case.mlp, PairedMLP):
        return _paired_block(case, case.mlp, weights, pool)
    if isinstance(case.mlp, MoE):
        return _moe_block(case, case.mlp, weights, pool)
    assert not isinstance(case.mlp, ShortcutMLP)  # refused otherwise
    kernel = _mlp(case.mlp, weights, norm_of(case.norm, "norm", weights), case.residual_scale, pool)

    def stage(residual: Floats, delta: Floats | None) -> tuple[Floats, Floats]:
        total, out = _sum_of(pool, residual, delta), empty(pool, *residual.shape)
        kernel(residual, delta, total, out)
        return residual if total is None else total, out

    return stage


def _mlp(case: MLP | GatedMLP, weights: Weights, norm: Norm | None, scale: float, pool: Pool) -> Mlp:
    gated, activation = isinstance(case, GatedMLP), case.activation
    assert isinstance(activation, str)  # refused otherwise
    up = _matrix(weights, ("gate", "up") if gated else ("up",), pool, interleave=gated)
    return Mlp(pool, up, _matrix(weights, ("down",), pool), norm, scale, *activation_of(activation))


def _moe_block(case: MLPBlock, moe: MoE, weights: Weights, pool: Pool) -> Callable[..., Any]:
    """Build a MoE block: the router and the shared expert's gate with the residual sum, the choice, the experts."""
    norm = norm_of(case.norm, "norm", weights)
    scores = Products(
        weights, ("router", "shared_gate") if moe.shared_gate else ("router",), norm, case.residual_scale, pool
    )
    choose, own = route(moe, pool), (weights.vector("choice.bias"), weights.vector("expert_scale.weight"))
    shared = _mlp(moe.shared, weights.under("shared."), norm, 1.0, pool) if moe.shared else None
    routed = (_latent_experts if moe.latent_size else _experts)(moe, weights, norm, pool)

    def stage(residual: Floats, delta: Floats | None) -> tuple[Floats, Floats]:
        total, (logits, *gate) = scores(residual, delta)
        ids, shares = choose(logits, *own)
        also = None
        if shared:
            also = empty(pool, *total.shape)
            shared(total, None, None, also)
        return total, routed(total, ids, shares, also, gate[0] if gate else None)

    return stage


def _paired_block(case: MLPBlock, both: PairedMLP, weights: Weights, pool: Pool) -> Callable[..., Any]:
    """Build a dense MLP beside experts: the MLP with the residual sum, the router, the experts, and their norms."""
    dense = _mlp(both.dense, weights.under("dense."), norm_of(case.norm, "norm", weights), case.residual_scale, pool)
    names = "router_norm", "experts_norm", "dense_post_norm", "experts_post_norm"
    router_norm, experts_norm, dense_post, experts_post = (norm_of(both.norm, name, weights) for name in names)
    logits, choose = Products(weights, ("router",), router_norm, 1.0, pool), route(both.moe, pool)
    own = weights.vector("choice.bias"), weights.vector("expert_scale.weight")
    routed, plus, times = _experts(both.moe, weights, experts_norm, pool), add(None, pool), scale(None, pool)
    assert dense_post and experts_post

    def stage(residual: Floats, delta: Floats | None) -> tuple[Floats, Floats]:
        total, out = _sum_of(pool, residual, delta), empty(pool, *residual.shape)
        dense(residual, delta, total, out)
        x = residual if total is None else total
        chosen = choose(times(logits(x)[1][0], x.shape[-1] ** -0.5), *own)
        also = routed(x, *chosen, None, None)
        dense_post(pool, out, out)
        experts_post(pool, also, also)
        return x, plus(out, also, 1.0)

    return stage


Routed = Callable[
    [Floats, Ints, Floats, Floats | None, Floats | None], Floats
]  # (x, ids, weights, result of the shared expert, its gate)


def _experts(moe: MoE, weights: Weights, norm: Norm | None, pool: Pool) -> Routed:
    width = weights.experts["down"][0].data.shape[0]
    kernel = build_experts(moe, weights, pool, norm)

    def run(x: Floats, ids: Ints, shares: Floats, also: Floats | None, gate: Floats | None) -> Floats:
        out = empty(pool, len(x), width)
        kernel(x, ids, shares, also, gate, out)
        return out

    return run


def _latent_experts(moe: MoE, weights: Weights, norm: Norm | None, pool: Pool) -> Routed:
    """Build experts that work in a latent space, with a matrix into it and one out of it."""
    into, out_of = (
        Products(weights, ("latent_in",), norm, 1.0, pool),
        Products(weights, ("latent_out",), None, 1.0, pool),
    )
    inside, plus, gated = _experts(moe, weights, None, pool), add(None, pool), sigmoid_gate(None, pool)

    def run(x: Floats, ids: Ints, shares: Floats, also: Floats | None, gate: Floats | None) -> Floats:
        out = out_of(inside(into(x)[1][0], ids, shares, None, None))[1][0]
        if also is None:
            return out
        return plus(out, also if gate is None else gated(also, gate), 1.0)

    return run


class HeadKernel:
    """The last norm and the output head, as one kernel; an `ops.api.HeadStage`."""

    def __init__(self, case: Head, weights: Weights, pool: Pool) -> None:
        self._matrix, self._pool = _matrix(weights, ("head",), pool), pool
        self.rows = None if order_of(weights.linears["head"].data) is not None else self._rows
        cap = case.logit_softcap or 0.0
        norm = norm_of(case.norm, "norm", weights)
        self._kernel = Projection(pool, self._matrix, norm, case.residual_scale, case.logit_scale, cap)
        self._plain = Projection(pool, self._matrix, None, 1.0, case.logit_scale, cap)

    def __call__(self, residual: Floats, delta: Floats | None, rows: Ints | None) -> Floats:
        out = empty(self._pool, len(residual if rows is None else rows), self._matrix.rows)
        self._kernel(residual, delta, rows, None, out)
        return out

    def project(self, x: Floats) -> Floats:
        out = empty(self._pool, len(x), self._matrix.rows)
        self._plain(x, None, None, None, out)
        return out

    def _rows(self, ids: Ints) -> Floats:
        out = empty(self._pool, ids.size, self._matrix.columns)
        self._matrix.take(self._pool, ids, out)
        return out


class Products:
    """Multiplies one input with several matrices, after a residual sum and a norm."""

    def __init__(self, weights: Weights, names: tuple[str, ...], norm: Norm | None, scale: float, pool: Pool) -> None:
        self._rows, self._pool = [weights.linears[name].data.shape[0] for name in names], pool
        alike: dict[Any, list[int]] = {}
        for i, name in enumerate(names):
            alike.setdefault(packing_key(weights.linears[name]), []).append(i)
        self._passes = [
            (some, Heads(pool, _matrix(weights, tuple(names[i] for i in some), pool), norm, scale, PANEL, 0, False,
                         False, [], 0))
            for some in alike.values()
        ]  # fmt: skip

    def __call__(self, residual: Floats, delta: Floats | None = None) -> tuple[Floats, list[Floats]]:
        """Return the residual sum, and the product with each matrix."""
        total = _sum_of(self._pool, residual, delta)
        outs = [empty(self._pool, len(residual), n) for n in self._rows]
        for some, kernel in self._passes:
            kernel(residual, delta, total, None, None, [outs[i] for i in some])
        return residual if total is None else total, outs


def _matrix(weights: Weights, names: str | tuple[str, ...], pool: Pool, *, interleave: bool = False) -> Matrix:
    return build_matrix(pool, [weights.linears[name] for name in names], interleave=interleave)


def norm_of(case: RMSNorm | LayerNorm | None, name: str, weights: Weights) -> Norm | None:
    """Return a norm with its weights, or None."""
    if case is None:
        return None
    weight: Any = weights.arrays[f"{name}.weight"]
    bias: Any = weights.vector(f"{name}.bias")
    return build_norm(case, weight, bias)


def _sum_of(pool: Pool, residual: Floats, delta: Floats | None) -> Floats | None:
    """Return memory for the residual sum, or None where there is no delta."""
    return None if delta is None else empty(pool, *residual.shape)


FUSED: Mapping[Op[Any], Stage] = {
    api.ATTENTION_INPUT: Stage(refuses_heads, attention_input),
    api.QUERY_INPUT: Stage(refuses_heads, query_input),
    api.ATTENTION_OUTPUT: Stage(refuses_output, attention_output),
    api.PRODUCT: Stage(refuses_format, Product),
    api.EXPERT_BLOCK: Stage(refuses_inputs, experts),
    api.MLP_BLOCK: Stage(refuses_mlp, mlp_block),
    api.HEAD: Stage(never, HeadKernel),
}
