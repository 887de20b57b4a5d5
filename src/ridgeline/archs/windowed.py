"""Mellum 2, Flint and Kolibri 1: Qwen 3's attention with windows in some layers, and experts."""

from __future__ import annotations

from dataclasses import replace

from ridgeline.archs.config import Config
from ridgeline.archs.family import Family, Heads, attention, decoder, gated_mlp, layer_windows, rms_norm
from ridgeline.archs.moe import QWEN_NAMES
from ridgeline.archs.names import Tensor
from ridgeline.archs.rope import FULL, SLIDING, read_rope, read_ropes_of_layers
from ridgeline.spec import GatedMLP, Layer, ModelSpec, MoE


def mellum(c: Config) -> ModelSpec:
    """Mellum 2: each kind of layer has a rotation of its own."""
    c.rename({"num_experts": "num_local_experts"})
    heads, norm = Heads.read(c, num_kv_heads=4, head_dim_default=128, null_kv=False), rms_norm(c)
    dense, count, bias = gated_mlp(c), c.get_layer_count(), c.get_bool("attention_bias", False)
    moe = MoE(
        c.get_size("num_local_experts", 64), c.get_size("num_experts_per_tok", 8),
        c.get_size("moe_intermediate_size", 896), dense.activation, normalize=c.get_bool("norm_topk_prob", True),
    )  # fmt: skip
    windows = layer_windows(c, lambda i: False, c.get_size("sliding_window", 1024, None))
    kinds = [SLIDING if window else FULL for window in windows]
    bases = {FULL: {"rope_type": "default", "rope_theta": 5e5}, SLIDING: {"rope_type": "default", "rope_theta": 1e4}}
    ropes = read_ropes_of_layers(c, dict.fromkeys(kinds, heads.head_dim), bases, whole=True)
    sparse = c.get_choices("mlp_layer_types", count, ("dense", "sparse")) or ["sparse"] * count
    mixer = attention(heads, None, qkv_bias=bias, out_bias=bias, qk_norm=norm)
    layers = tuple(
        Layer(replace(mixer, rope=ropes[kind], window=w), moe if how == "sparse" else dense, norm)
        for kind, w, how in zip(kinds, windows, sparse, strict=True)
    )
    return decoder(c, layers, norm, max_len=c.get_size("max_position_embeddings"))


def flint(c: Config) -> ModelSpec:
    """Flint: sinks; local layers rotate, global ones have no positions; sigmoid scores and a shared expert."""
    heads, norm = Heads.read(c, num_kv_heads=4, head_dim_default=128, null_kv=False), rms_norm(c)
    dense, bias, count = gated_mlp(c), c.get_bool("attention_bias", False), c.get_layer_count()
    moe = MoE(
        c.get_size("num_experts", 256), c.get_size("num_experts_per_tok", 6), c.get_size("moe_intermediate_size", 512),
        dense.activation, normalize=c.get_bool("norm_topk_prob", True), scores="sigmoid",
        shared=replace(dense, intermediate_size=c.get_size("shared_expert_intermediate_size", 1024)),
    )  # fmt: skip
    step, only = c.get_size("decoder_sparse_step", 1), c.get_indices("mlp_only_layers", [0, 1])
    mixer = attention(heads, read_rope(c, heads.head_dim), qkv_bias=bias, out_bias=bias, qk_norm=norm, sinks=True)
    windows = layer_windows(c, lambda i: i > 1 and i % 4 != 1 and i < count - 1, c.get_size("sliding_window", 513))
    layers = tuple(
        Layer(
            replace(mixer, window=w, rope=mixer.rope if w else None),
            dense if i in only or (i + 1) % step else moe, norm,
        )
        for i, w in enumerate(windows)
    )  # fmt: skip
    return decoder(c, layers, norm)


def kolibri1(c: Config) -> ModelSpec:
    """Kolibri 1: norms before and after each branch; local layers rotate; a bias on the logits of the choice."""
    c.rename({"num_experts": "num_local_experts"})
    heads, norm = Heads.read(c, num_kv_heads=4, head_dim_default=128, null_kv=False), rms_norm(c)
    act, inner = c.get_activation("hidden_act", "silu"), c.get_size("moe_intermediate_size", 512)
    moe = MoE(
        c.get_size("num_local_experts", 384), c.get_size("num_experts_per_tok", 6), inner, act,
        normalize=c.get_bool("norm_topk_prob", False), scores="sigmoid", choice_bias=True, rates_logits=True,
        shared=GatedMLP(c.get_size("shared_expert_intermediate_size", 512), act),
    )  # fmt: skip
    mixer = attention(heads, read_rope(c, heads.head_dim), qk_norm=norm)
    windows = layer_windows(c, lambda i: (i + 1) % 5 != 0, c.get_size("sliding_window", 513, None))
    layers = (Layer(replace(mixer, window=w, rope=mixer.rope if w else None), moe, norm, norm) for w in windows)
    return decoder(c, tuple(layers), norm)


KOLIBRI_NAMES = QWEN_NAMES.with_parts(
    parts={
        "mixer_post_norm": "post_attn_norm",
        "mlp_norm": "post_attention_layernorm",
        "mlp_post_norm": "post_ffn_norm",
        "mlp.choice": Tensor("moe.router.expert_bias"),
        **{f"mlp.shared.{n}": f"mlp.shared_experts.{n}_proj" for n in ("gate", "up", "down")},
    }
)
FLINT_NAMES = QWEN_NAMES.with_parts(
    parts={
        "mixer.sinks": Tensor("self_attn.softmax_offset"),
        **{f"mlp.shared.{n}": f"mlp.shared_expert.{n}_proj" for n in ("gate", "up", "down")},
    }
)
_MTP = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_layer_types", "mtp_mlp_layer_types")
FAMILIES = (
    Family("mellum", mellum, QWEN_NAMES.with_parts(ignore=(*QWEN_NAMES.ignore, r"^mtp\.")), harmless=_MTP),
    Family("flint", flint, FLINT_NAMES),
    Family("kolibri1", kolibri1, KOLIBRI_NAMES),
)
