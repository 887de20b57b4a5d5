"""Stages as one kernel each: a residual sum, a norm, a product and what follows it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from ridgeline._kernels import Heads, Matrix, Mlp, Norm, Pool, Projection
from ridgeline.ops import api
from ridgeline.ops.api import Op, Rotary, Weights
from ridgeline.ops.cpu.elementwise import sigmoid_gate
from ridgeline.ops.cpu.kernel import never
from ridgeline.ops.cpu.linear import Product, activation_of, experts
from ridgeline.ops.cpu.matrices import Floats, build_matrix, build_norm
from ridgeline.ops.stages import AttentionInput, Head, MLPBlock
from ridgeline.spec import Attention, GatedMLP, LatentAttention, LayerNorm, MoE, RMSNorm

Ints = np.ndarray[Any, np.dtype[np.int64]]


class Stage(NamedTuple):
    """For which cases there is no kernel, and why; the kernel of a case, with its weights."""

    refuses: Callable[[Any], str | None]
    make: Callable[[Any, Weights, Pool], Callable[..., Any]]


def attention_input(case: AttentionInput, weights: Weights, pool: Pool) -> Callable[..., Any]:
    m = case.mixer
    run, q, kv = _heads(case, weights, pool, "qkv"), (m.num_heads, m.head_dim), (m.num_kv_heads, m.head_dim)
    gate = _gate(case, weights, pool)

    def stage(
        residual: Floats, delta: Floats | None, rotary: Rotary | None
    ) -> tuple[Floats, Floats, Floats | None, Floats, Floats]:
        outs: list[Floats] = [np.empty((len(residual), *shape), np.float32) for shape in (q, kv, kv)]
        total = run(residual, delta, rotary, outs)
        return total, outs[0], gate(residual, delta), outs[1], outs[2]

    return stage


def query_input(case: AttentionInput, weights: Weights, pool: Pool) -> Callable[..., Any]:
    m = case.mixer
    run, gate = _heads(case, weights, pool, "q"), _gate(case, weights, pool)

    def stage(residual: Floats, delta: Floats | None, rotary: Rotary | None) -> tuple[Floats, Floats, Floats | None]:
        q = np.empty((len(residual), m.num_heads, m.head_dim), np.float32)
        return run(residual, delta, rotary, [q]), q, gate(residual, delta)

    return stage


def _gate(case: AttentionInput, weights: Weights, pool: Pool) -> Callable[[Floats, Floats | None], Floats | None]:
    """What the results of attention are multiplied by, where a mixer has it."""
    if not case.mixer.out_gate:
        return lambda residual, delta: None
    matrix = _matrix(weights, ("out_gate",), pool)
    kernel = Projection(pool, matrix, _norm(case.norm, "norm", weights), case.residual_scale, 1.0, 0.0)

    def gate(residual: Floats, delta: Floats | None) -> Floats:
        out = np.empty((len(residual), matrix.rows), np.float32)
        kernel(residual, delta, None, None, out)
        return out

    return gate


def _heads(
    case: AttentionInput, weights: Weights, pool: Pool, names: str
) -> Callable[[Floats, Floats | None, Rotary | None, list[Floats]], Floats]:
    """Projections `names` into outputs; gives the residual."""
    m = case.mixer
    turned = names.replace("v", "")
    norms = [_norm(m.qk_norm, f"{name}_norm", weights) for name in turned] if m.qk_norm else []
    rope_dim, pairs = (m.rope.dim, m.rope.interleaved) if m.rope else (0, False)
    kernel = Heads(
        pool, _matrix(weights, names, pool), _norm(case.norm, "norm", weights), case.residual_scale,
        m.head_dim, rope_dim, pairs, m.qk_norm_over == "all_heads", [n for n in norms if n], len(turned),
    )  # fmt: skip

    def run(residual: Floats, delta: Floats | None, rotary: Rotary | None, outs: list[Floats]) -> Floats:
        total = _sum_of(residual, delta)
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
        out = np.empty((len(attended), matrix.rows), np.float32)
        kernel(attended, None, None, None, out)
        return out

    return stage


def mlp_block(case: MLPBlock, weights: Weights, pool: Pool) -> Callable[..., Any]:
    mlp = case.mlp
    gated = isinstance(mlp, GatedMLP)
    up = _matrix(weights, ("gate", "up") if gated else ("up",), pool, interleave=gated)
    activation = activation_of(mlp.activation)
    kernel = Mlp(
        pool, up, _matrix(weights, ("down",), pool), _norm(case.norm, "norm", weights), case.residual_scale, *activation
    )

    def stage(residual: Floats, delta: Floats | None) -> tuple[Floats, Floats]:
        total, out = _sum_of(residual, delta), np.empty(residual.shape, np.float32)
        kernel(residual, delta, total, out)
        return residual if total is None else total, out

    return stage


def head(case: Head, weights: Weights, pool: Pool) -> Callable[..., Floats]:
    matrix = _matrix(weights, ("head",), pool)
    norm = _norm(case.norm, "norm", weights)
    kernel = Projection(pool, matrix, norm, case.residual_scale, case.logit_scale, case.logit_softcap or 0.0)

    def stage(residual: Floats, delta: Floats | None, rows: Ints | None) -> Floats:
        out = np.empty((len(residual if rows is None else rows), matrix.rows), np.float32)
        kernel(residual, delta, rows, None, out)
        return out

    return stage


def _no_experts(case: MLPBlock) -> str | None:
    return "its experts, its router and its choice are ops of their own" if isinstance(case.mlp, MoE) else None


def _matrix(weights: Weights, names: str | tuple[str, ...], pool: Pool, *, interleave: bool = False) -> Matrix:
    return build_matrix(pool, [weights.linears[name] for name in names], interleave=interleave)


def _norm(case: RMSNorm | LayerNorm | None, name: str, weights: Weights) -> Norm | None:
    if case is None:
        return None
    weight: Any = weights.arrays[f"{name}.weight"]
    bias: Any = weights.vector(f"{name}.bias")
    return build_norm(case, weight, bias)


def _sum_of(residual: Floats, delta: Floats | None) -> Floats | None:
    """Room for the residual sum, where there is one."""
    return None if delta is None else np.empty(residual.shape, np.float32)


STAGES: Mapping[Op[Any], Stage] = {
    api.ATTENTION_INPUT: Stage(never, attention_input),
    api.QUERY_INPUT: Stage(never, query_input),
    api.ATTENTION_OUTPUT: Stage(never, attention_output),
    api.PRODUCT: Stage(never, Product),
    api.EXPERT_BLOCK: Stage(never, experts),
    api.MLP_BLOCK: Stage(_no_experts, mlp_block),
    api.HEAD: Stage(never, head),
}
