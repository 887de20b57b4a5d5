"""OLMo 2 and 3: norms after each branch, and q and k norms over all heads at once."""

from __future__ import annotations

from ridgeline.archs.config import Config
from ridgeline.archs.family import Family, Heads, attention, decoder, gated_mlp, layer_windows, rms_norm
from ridgeline.archs.names import LLAMA
from ridgeline.archs.rope import FULL, SLIDING, read_rope, read_ropes_by_kind
from ridgeline.spec import Attention, Layer, ModelSpec, RMSNorm, Rope


def _attention(c: Config, heads: Heads, rope: Rope, norm: RMSNorm, window: int | None = None) -> Attention:
    bias = c.get_bool("attention_bias", False)
    return attention(heads, rope, window=window, qkv_bias=bias, out_bias=bias, qk_norm=norm, qk_norm_over="all_heads")


def olmo2(c: Config) -> ModelSpec:
    """OLMo 2 (arXiv:2501.00656)."""
    heads, norm = Heads.read(c), rms_norm(c, 1e-5)
    mixer = _attention(c, heads, read_rope(c, heads.head_dim), norm)
    layer = Layer(mixer, gated_mlp(c), pre_norm=None, post_norm=norm)
    return decoder(c, (layer,) * c.get_layer_count(), norm)


def olmo3(c: Config) -> ModelSpec:
    """OLMo 3: three local layers for each global one; yarn only on the global ones."""
    heads, norm, mlp = Heads.read(c), rms_norm(c, 1e-5), gated_mlp(c)
    ropes = read_ropes_by_kind(c, heads.head_dim, full_theta=5e5, sliding_theta=5e5, sliding_theta_field=None)
    layers = tuple(
        Layer(_attention(c, heads, ropes[SLIDING if w else FULL], norm, w), mlp, None, norm)
        for w in layer_windows(c, lambda i: (i + 1) % 4 != 0, c.get_size("sliding_window", 4096, None))
    )
    return decoder(c, layers, norm, max_len=c.get_size("max_position_embeddings"))


NAMES = LLAMA.with_parts(
    parts={
        "mixer_norm": None,
        "mlp_norm": None,
        "mixer_post_norm": "post_attention_layernorm",
        "mlp_post_norm": "post_feedforward_layernorm",
    }
)

FAMILIES = (Family("olmo2", olmo2, NAMES), Family("olmo3", olmo3, NAMES))
