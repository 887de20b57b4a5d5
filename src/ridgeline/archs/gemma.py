"""Gemma 2 and Gemma 3: norms before and after each branch, stored as weight - 1; scaled embeddings; local
layers.
"""

from __future__ import annotations

from ridgeline.archs.config import Config
from ridgeline.archs.family import WITHOUT_SIGHT, Family, Heads, attention, decoder, layer_windows, rms_norm
from ridgeline.archs.names import LLAMA
from ridgeline.archs.rope import FULL, SLIDING, read_rope, read_ropes_by_kind
from ridgeline.spec import GatedMLP, Layer, ModelSpec


def _mlp(c: Config) -> GatedMLP:
    return GatedMLP(c.get_int("intermediate_size"), c.get_activation("hidden_activation", "gelu_pytorch_tanh"))


def gemma2(c: Config) -> ModelSpec:
    """Gemma 2: every second layer is local; attention scores and logits are soft-capped (arXiv:2408.00118)."""
    c.expect("use_bidirectional_attention", False)
    return _capped(c, post_norm=True)


def vaultgemma(c: Config) -> ModelSpec:
    """VaultGemma: Gemma 2 without norms after the branches (arXiv:2510.15001)."""
    return _capped(c, post_norm=False)


def _capped(c: Config, *, post_norm: bool) -> ModelSpec:
    heads, norm, bias = (
        Heads.read(c, num_kv_heads=4, head_dim_default=256, null_kv=False),
        rms_norm(c, offset=1.0),
        c.get_bool("attention_bias", False),
    )
    rope, mlp = read_rope(c, heads.head_dim), _mlp(c)
    # An absent cap has the default; only null means no cap.
    softcap = c.get_positive("attn_logit_softcapping", 50.0, None)
    logit_softcap = c.get_positive("final_logit_softcapping", 30.0, None)
    scale = c.get_size("query_pre_attn_scalar", 256) ** -0.5
    layers = tuple(
        Layer(
            attention(
                heads, rope, qkv_bias=bias, out_bias=bias, scale=scale, window=window, softcap=softcap
            ),
            mlp, norm, norm if post_norm else None,
        )
        for window in layer_windows(c, lambda i: i % 2 == 0, c.get_size("sliding_window", 4096, None))
    )  # fmt: skip
    return decoder(
        c, layers, norm, tied=True,
        embedding_scale=c.get_size("hidden_size") ** 0.5,
        logit_softcap=logit_softcap,
    )  # fmt: skip


def gemma3(c: Config) -> ModelSpec:
    """Gemma 3: five local layers for each global one, with separate RoPE settings; q and k norms (arXiv:2503.19786)."""
    heads, norm, bias = (
        Heads.read(c, num_kv_heads=4, head_dim_default=256, null_kv=False),
        rms_norm(c, offset=1.0),
        c.get_bool("attention_bias", False),
    )
    c.expect("use_bidirectional_attention", False)
    c.expect("attn_logit_softcapping")
    ropes = read_ropes_by_kind(
        c, heads.head_dim, full_theta=1e6, sliding_theta=1e4, sliding_theta_field="rope_local_base_freq"
    )
    period = c.get_size("sliding_window_pattern", 6)
    scale, mlp = c.get_size("query_pre_attn_scalar", 256) ** -0.5, _mlp(c)
    layers = tuple(
        Layer(
            attention(
                heads, ropes[SLIDING if window else FULL], qkv_bias=bias, out_bias=bias, scale=scale,
                window=window, qk_norm=norm,
            ),
            mlp, norm, norm,
        )
        for window in layer_windows(c, lambda i: (i + 1) % period != 0, c.get_size("sliding_window", 4096, None))
    )  # fmt: skip
    return decoder(
        c, layers, norm, tied=True, max_len=c.get_size("max_position_embeddings"),
        embedding_scale=c.get_size("hidden_size") ** 0.5,
        logit_softcap=c.get_positive("final_logit_softcapping", None, None),
    )  # fmt: skip


def gemma3_inside(c: Config) -> ModelSpec:
    """Gemma 3 from 4B on, inside a model that also sees: published configs leave out what is the class's default."""
    return gemma3(c.assume({"vocab_size": 262_208, "num_attention_heads": 8, "max_position_embeddings": 131_072}))


NAMES = LLAMA.with_parts(
    parts={
        "mixer_post_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "mlp_post_norm": "post_feedforward_layernorm",
    }
)


INSIDE = NAMES.within_sight()
_WHOLE = (
    "vision_config", "mm_tokens_per_image", "image_token_index", "boi_token_index", "eoi_token_index", "image_token_id",
    "boi_token_id", "eoi_token_id",
)  # fmt: skip
_OLD = ("hidden_act", "_sliding_window_pattern")

# Some configs also contain hidden_act and sliding_window_size, which the published code does not read.
FAMILIES = (
    Family("gemma2", gemma2, NAMES, harmless=("hidden_act", "sliding_window_size")),
    Family("vaultgemma", vaultgemma, NAMES),
    Family("gemma3_text", gemma3, NAMES, harmless=_OLD),
    Family("gemma3", gemma3_inside, INSIDE, (*_OLD, *_WHOLE), within="text_config", note=WITHOUT_SIGHT),
)
