"""Jamba: one attention layer without positions in each group of Mamba layers, and experts in every other layer."""

from __future__ import annotations

import math
from collections.abc import Callable

from ridgeline.archs.config import Config
from ridgeline.archs.family import Family, Heads, attention, decoder, gated_mlp, rms_norm
from ridgeline.archs.names import LLAMA, Each
from ridgeline.spec import ChannelMixer, GatedMLP, Layer, Mamba, ModelSpec, MoE, TokenMixer

NAMES = LLAMA.with_parts(
    root={"embed": "model.embed_tokens", "norm": "model.final_layernorm", "head": "lm_head"},
    parts={
        "mixer": "mamba",
        "mixer.in": "mamba.in_proj",
        "mixer.conv": "mamba.conv1d",
        "mixer.x": "mamba.x_proj",
        "mixer.dt_norm": "mamba.dt_layernorm",
        "mixer.b_norm": "mamba.b_layernorm",
        "mixer.c_norm": "mamba.c_layernorm",
        "mixer.dt": "mamba.dt_proj",
        "mixer.out": "mamba.out_proj",
        "mlp_norm": "pre_ff_layernorm",
        "mlp.gate": "feed_forward.gate_proj",
        "mlp.up": "feed_forward.up_proj",
        "mlp.down": "feed_forward.down_proj",
        "mlp.router": "feed_forward.router",
        **{f"mlp.experts.{n}": Each(f"feed_forward.experts.{{e}}.{n}_proj") for n in ("gate", "up", "down")},
    },
)
HARMLESS = (
    "use_mamba_kernels", "use_mambapy", "use_associative_scan", "num_logits_to_keep", "calc_logits_for_entire_prompt",
    "n_ctx", "layers_block_type", "layer_types", "layers_num_experts",
)  # fmt: skip


def jamba(c: Config) -> ModelSpec:
    """Jamba and Jamba-1.5 (arXiv:2403.19887, 2408.12570)."""
    norm, hidden = rms_norm(c), c.get_size("hidden_size")
    rank = c.get_auto("mamba_dt_rank", math.ceil(hidden / 16))
    c.expect("sliding_window")
    c.expect("mamba_inner_layernorms", True)
    full = attention(Heads.read(c, num_kv_heads=8, null_kv=False), None)
    mamba = Mamba(
        inner_size=c.get_size("mamba_expand", 2) * hidden, state_size=c.get_size("mamba_d_state", 16),
        conv_size=c.get_size("mamba_d_conv", 4), dt_rank=rank, activation=c.get_activation("hidden_act", "silu"),
        bias=c.get_bool("mamba_proj_bias", False), conv_bias=c.get_bool("mamba_conv_bias", True),
        inner_norm=norm, inner_norm_weights=True,
    )  # fmt: skip
    mlp = gated_mlp(c)
    mixers: dict[bool, TokenMixer] = {True: full, False: mamba}
    channels: dict[bool, ChannelMixer] = {True: _experts(c, mlp), False: mlp}
    is_full, is_moe = _period(c, "attn_layer", 8, 4), _period(c, "expert_layer", 2, 1)
    layers = tuple(Layer(mixers[is_full(i)], channels[is_moe(i)], norm) for i in range(c.get_layer_count()))
    return decoder(c, layers, norm, max_len=c.get_size("max_position_embeddings", 262_144))


def _experts(c: Config, mlp: GatedMLP) -> ChannelMixer:
    """Return a mixture of the usual MLP, or only that MLP if there is one expert."""
    experts, chosen = c.get_size("num_experts", 16), c.get_size("num_experts_per_tok", 2)
    if experts == 1:
        return mlp
    return MoE(experts, chosen, mlp.intermediate_size, mlp.activation, normalize=False)


def _period(c: Config, name: str, period: int, offset: int) -> Callable[[int], bool]:
    """Return which layers are of a kind that occurs once per period."""
    period, offset = c.get_int(f"{name}_period", period), c.get_int(f"{name}_offset", offset)
    if not 0 <= offset < period:
        raise c.error(f"{name}_offset", f"is {offset}; it must be from 0 to {period - 1}, the end of the period")
    return lambda i: i % period == offset


FAMILIES = (Family("jamba", jamba, NAMES, HARMLESS),)
