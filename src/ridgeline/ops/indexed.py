"""The stage before attention over keys that an indexer selects, as a composition of primitives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from ridgeline.ops import api
from ridgeline.ops.api import Array, Rotary, Weights
from ridgeline.ops.parts import Ops
from ridgeline.spec import IndexedAttention, Norm


@dataclass(frozen=True, slots=True)
class IndexedInput:
    """residual += scale * delta; x = norm(residual); c = norm(q_a x); q = rope(q_b c); kv, k = kv_a x.

    The state gets [norm(kv), rope(k)] and rope(norm(index_k x)). The indexer's queries are rope(index_q c), and its
    weights index_weights x over the root of the numbers of all its heads.
    """

    mixer: IndexedAttention
    norm: Norm | None
    residual_scale: float


def indexed_input(case: IndexedInput, weights: Weights, table: Ops) -> Callable[..., Any]:
    m, own = case.mixer.latent, case.mixer.indexer
    add, scale, join = table.primitive(api.ADD), table.primitive(api.SCALE), table.primitive(api.JOIN)
    cut = table.primitive(api.CUT)
    split, linears = table.primitive(api.SPLIT_HEADS), weights.linears
    norms = (("norm", case.norm), ("q_a_norm", m.latent_norm), ("kv_a_norm", m.latent_norm), ("index_k_norm", own.norm))
    norm, q_norm, kv_norm, k_norm = (_norm(kind, name, weights, table) for name, kind in norms)
    rope = table.primitive(api.ROPE, m.rope) if m.rope else None
    index_rope = table.primitive(api.ROPE, replace(m.rope, interleaved=own.interleaved)) if m.rope else None
    rotated, factor = m.qk_rope_head_dim, (own.num_heads * own.head_dim) ** -0.5

    def first(x: Array, rotary: Rotary | None) -> Array:
        """Rotate the first numbers of each head [T, heads, numbers]."""
        if index_rope is None or rotary is None:
            return x
        turned = index_rope(cut(x, 0, rotated), rotary)
        return join(turned, cut(x, rotated, own.head_dim)) if rotated < own.head_dim else turned

    def last(x: Array, rotary: Rotary | None, start: int) -> Array:
        """Return the numbers of each head from `start` on, rotated."""
        part = cut(x, start, start + rotated)
        return rope(part, rotary) if rope and rotary else part

    def run(residual: Array, delta: Array | None, rotary: Rotary | None) -> tuple[Array, ...]:
        residual = residual if delta is None else add(residual, delta, case.residual_scale)
        x = norm(residual)
        base = q_norm(linears["q_a"].apply(x))
        q, kept = split(linears["q_b"].apply(base), m.num_heads), split(linears["kv_a"].apply(x), 1)
        latent = kv_norm(cut(kept, 0, m.kv_lora_rank))
        latent = latent if m.latent_scale == 1.0 else scale(latent, m.latent_scale)
        return (
            residual,
            join(cut(q, 0, m.qk_nope_head_dim), last(q, rotary, m.qk_nope_head_dim)),
            join(latent, last(kept, rotary, m.kv_lora_rank)),
            first(split(k_norm(linears["index_k"].apply(x)), 1), rotary),
            first(split(linears["index_q"].apply(base), own.num_heads), rotary),
            scale(linears["index_weights"].apply(x), factor),
        )

    return run


def _norm(norm: Norm | None, name: str, weights: Weights, table: Ops) -> Callable[[Array], Array]:
    if norm is None:
        return lambda x: x
    kernel, bias = table.primitive(api.NORM, norm), weights.vector(f"{name}.bias")
    return lambda x: kernel(x, weights.arrays[f"{name}.weight"], bias)
