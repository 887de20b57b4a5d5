"""Laguna: gates of attention with softplus, numbers of heads that differ between layers, experts."""

from __future__ import annotations

from dataclasses import replace

from ridgeline.archs.config import Config
from ridgeline.archs.family import Family, Heads, attention, decoder, gated_mlp, rms_norm
from ridgeline.archs.names import Tensor
from ridgeline.archs.rope import FULL, SLIDING, read_ropes_of_layers
from ridgeline.archs.routed import GLM_NAMES
from ridgeline.spec import Attention, Layer, ModelSpec, MoE, Norm

_ROPES = {
    FULL: {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.5},
    SLIDING: {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0},
}


def laguna(c: Config) -> ModelSpec:
    """Laguna XS and M: a shared expert beside those that sigmoid scores choose."""
    norm, dense, count = rms_norm(c), gated_mlp(c), c.get_layer_count()
    for name, value in (("moe_apply_router_weight_on_input", False), ("moe_router_logit_softcapping", 0.0)):
        c.expect(name, value, int(value), null=False)
    moe = MoE(
        c.get_size("num_experts", 256), c.get_size("num_experts_per_tok", 8), c.get_size("moe_intermediate_size", 512),
        dense.activation, scores="sigmoid", choice_bias=True, scale=c.get_float("moe_routed_scaling_factor", 1.0),
        shared=replace(dense, intermediate_size=c.get_size("shared_expert_intermediate_size", 512)),
    )  # fmt: skip
    kinds = c.get_choices("mlp_layer_types", count, ("dense", "sparse")) or ["dense", *["sparse"] * (count - 1)]
    mixers = _mixers(c, count, norm)
    layers = (Layer(own, dense if kind == "dense" else moe, norm) for own, kind in zip(mixers, kinds, strict=True))
    return decoder(c, tuple(layers), norm, max_len=c.get_size("max_position_embeddings"))


def _mixers(c: Config, count: int, norm: Norm) -> list[Attention]:
    """Return the attention of each layer."""
    heads = Heads.read(c, num_kv_heads=8, head_dim_default=128, null_kv=False)
    c.expect("attention_bias", False)
    gating = c.raw("gating") if c.present("gating") else True
    if gating is not True and gating not in ("per-head", "per-element"):
        raise c.error("gating", f"is {gating!r:.100}; supported: true, per-head, per-element")
    each = c.get_indices("num_attention_heads_per_layer", [heads.num_heads] * count)
    if len(each) != count or min(each) < 1:
        raise c.error("num_attention_heads_per_layer", f"must hold {count} entries, each at least 1")
    for own in each:
        c.divide("num_attention_heads_per_layer", own, "num_key_value_heads", heads.num_kv_heads)
    kinds = c.get_choices("layer_types", count, {FULL, SLIDING}) or [FULL] * count
    sizes = dict.fromkeys(kinds, heads.head_dim)
    ropes, window = read_ropes_of_layers(c, sizes, _ROPES, share=1.0), c.get_size("sliding_window", 512)
    return [
        attention(
            replace(heads, num_heads=own), ropes[kind], window=window if kind == SLIDING else None, qk_norm=norm,
            out_gate=True, gate_act="softplus", gate_over="number" if gating == "per-element" else "head",
        )
        for own, kind in zip(each, kinds, strict=True)
    ]  # fmt: skip


NAMES = GLM_NAMES.with_parts(
    parts={
        "mixer.out_gate": "self_attn.g_proj",
        "mlp.choice": Tensor("mlp.experts.e_score_correction_bias"),
        **{f"mlp.shared.{n}": f"mlp.shared_expert.{n}_proj" for n in ("gate", "up", "down")},
    }
)
FAMILIES = (Family("laguna", laguna, NAMES),)
