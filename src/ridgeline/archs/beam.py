"""Beam: branches whose weight in the stream falls with their number, gates with a bias of heads, experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ridgeline.archs.config import Config
from ridgeline.archs.family import Family, Heads, attention, decoder, gated_mlp, layer_windows, rms_norm
from ridgeline.archs.names import Tensor
from ridgeline.archs.rope import FULL, SLIDING, read_ropes_of_layers
from ridgeline.archs.routed import GLM_NAMES, experts
from ridgeline.spec import Attention, Layer, ModelSpec, QueryGrowth, RMSNorm

_ROPES: Mapping[str, Any] = {SLIDING: {"rope_type": "default", "rope_theta": 1e4}, FULL: None}


def beam(c: Config) -> ModelSpec:
    """Beam 501B: after n - 1 branches, the sum is sqrt((n - 1) / n) times the stream and 1 / sqrt(n) times the next.

    The stream here is sqrt(n) times as large, so that a branch is added as it is. All that reads it is a norm, whose
    eps is n times as large.
    """
    c.assume({"n_group": 8, "topk_group": 4})
    norm, dense, count = rms_norm(c), gated_mlp(c), c.get_layer_count()
    moe = experts(
        c, dense, c.get_size("num_experts", 256), c.get_size("num_experts_per_tok", 8),
        c.get_size("moe_intermediate_size", 2560), 0, normalize=c.get_bool("norm_topk_prob", True),
        name="num_experts", scale=2.5,
    )  # fmt: skip
    kinds = c.get_choices("mlp_layer_types", count, ("dense", "sparse"))
    kinds = kinds or ["dense" if i < 3 else "sparse" for i in range(count)]

    def before(branch: int) -> RMSNorm:
        return replace(norm, eps=norm.eps * branch)

    layers = (
        Layer(own, dense if kind == "dense" else moe, before(2 * i + 1), norm, mlp_pre_norm=before(2 * i + 2))
        for i, (own, kind) in enumerate(zip(_mixers(c, count, norm), kinds, strict=True))
    )
    cap = c.get_positive("final_logit_softcapping", 30.0, None)
    length = c.get_size("max_position_embeddings")
    return decoder(c, tuple(layers), before(2 * count + 1), max_len=length, logit_softcap=cap)


def _mixers(c: Config, count: int, norm: RMSNorm) -> list[Attention]:
    """Return the attention of each layer: where a kind of layer does not rotate, its queries grow instead."""
    heads, bias = (
        Heads.read(c, num_kv_heads=8, head_dim_default=128, null_kv=False),
        c.get_bool("attention_bias", False),
    )
    window = c.get_size("sliding_window", 512, None)
    windows = layer_windows(c, lambda i: bool((i + 1) % 6) and i < count - 1, window)
    given = c.raw("rope_parameters") or _ROPES
    still = {kind for kind in (FULL, SLIDING) if isinstance(given, Mapping) and kind in given and given[kind] is None}
    used = {SLIDING if own else FULL for own in windows}
    ropes = read_ropes_of_layers(c, dict.fromkeys(sorted(used - still), heads.head_dim), _ROPES)
    return [
        attention(
            heads, rope := ropes.get(SLIDING if own else FULL), window=own, qk_norm=norm, qkv_bias=bias, out_bias=bias,
            out_gate=True, gate_bias=True, growth=None if rope else QueryGrowth(0.1, 2048, 1, "power"),
        )
        for own in windows
    ]  # fmt: skip


NAMES = GLM_NAMES.with_parts(
    parts={
        "mixer.out_gate": "self_attn.gate_proj",
        "mixer.gate_bias": Tensor("self_attn.gate_bias"),
        "mixer_post_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "mlp_post_norm": "post_feedforward_layernorm",
    }
)
FAMILIES = (Family("beam", beam, NAMES),)
