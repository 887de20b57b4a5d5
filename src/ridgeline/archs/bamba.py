"""Bamba: Mamba-2 layers with some attention layers among them, and an MLP in each layer."""

from __future__ import annotations

from ridgeline.archs.config import Config
from ridgeline.archs.family import Family, Heads, attention, decoder, gated_mlp, rms_norm
from ridgeline.archs.mamba import step_limits
from ridgeline.archs.names import LLAMA, Source
from ridgeline.archs.rope import Rotation, read_rope
from ridgeline.spec import Layer, Mamba2, ModelSpec, RMSNorm

MAMBA: dict[str, Source | None] = {
    "mixer": "mamba",
    "mixer.in": "mamba.in_proj",
    "mixer.conv": "mamba.conv1d",
    "mixer.gate_norm": "mamba.norm",
    "mixer.out": "mamba.out_proj",
}
NAMES = LLAMA.with_parts(
    root={"embed": "model.embed_tokens", "norm": "model.final_layernorm", "head": "lm_head"},
    parts={
        **MAMBA,
        "mlp_norm": "pre_ff_layernorm",
        "mlp.gate": "feed_forward.gate_proj",
        "mlp.up": "feed_forward.up_proj",
        "mlp.down": "feed_forward.down_proj",
    },
)
# The chunk size of a scan, and fields that follow from attn_layer_indices.
HARMLESS = (
    "mamba_chunk_size",
    "partial_rotary_factor",
    "num_logits_to_keep",
    "z_loss_coefficient",
    "layers_block_type",
    "layer_types",
)


def bamba(c: Config) -> ModelSpec:
    """Bamba 9B (IBM, Princeton, CMU and UIUC, 2024): half of each attention head is rotated."""
    norm, heads, bias = rms_norm(c, 1e-5), Heads.read(c, num_kv_heads=8), c.get_bool("attention_bias", False)
    c.expect("attn_rotary_emb", heads.head_dim // 2)
    rope = read_rope(c, heads.head_dim, Rotation(partial=0.5, partial_field=None))
    full = attention(heads, rope, qkv_bias=bias, out_bias=bias)
    mamba, mlp = mamba2_mixer(c, norm), gated_mlp(c, bias=c.get_bool("mlp_bias", False))
    indices = c.get_indices("attn_layer_indices", [])
    layers = tuple(Layer(full if i in indices else mamba, mlp, norm) for i in range(c.get_layer_count()))
    return decoder(c, layers, norm, max_len=c.get_size("max_position_embeddings", 262_144))


def mamba2_mixer(c: Config, norm: RMSNorm | None, channels: int | None = None) -> Mamba2:
    """Return Mamba-2 as the configs of Bamba, Granite 4 and Falcon-H1 describe it.

    channels: the inner size; None: mamba_expand times the hidden size.
    """
    heads, inner = (
        c.get_size("mamba_n_heads", 128),
        channels or c.get_size("mamba_expand", 2) * c.get_size("hidden_size"),
    )
    head_dim = c.get_auto("mamba_d_head", inner // heads)
    if heads * head_dim != inner:
        raise c.error("mamba_expand", f"gives {inner} channels, but mamba_n_heads x mamba_d_head is {heads * head_dim}")
    least, most = step_limits(c)
    groups = c.get_size("mamba_n_groups", 1)
    c.divide("mamba_n_heads", heads, "mamba_n_groups", groups)
    return Mamba2(
        num_heads=heads, head_dim=head_dim, state_size=c.get_size("mamba_d_state", 256),
        num_groups=groups, conv_size=c.get_size("mamba_d_conv", 4), norm=norm,
        activation=c.get_activation("hidden_act", "silu"), bias=c.get_bool("mamba_proj_bias", False, null=False),
        conv_bias=c.get_bool("mamba_conv_bias", True, null=False), dt_least=least, dt_most=most,
    )  # fmt: skip


FAMILIES = (Family("bamba", bamba, NAMES, HARMLESS),)
