"""Command R and R7B (Cohere): parallel branches behind one norm without a bias, and scaled logits."""

from __future__ import annotations

from dataclasses import replace

from ridgeline.archs.config import Config
from ridgeline.archs.family import Family, Heads, attention, decoder, gated_mlp, layer_windows
from ridgeline.archs.rope import Rotation, read_rope
from ridgeline.spec import Attention, LayerNorm, ModelSpec, ParallelLayer


def cohere(c: Config) -> ModelSpec:
    """Command R and Aya 23: neighboring numbers of a head are rotated together."""
    c.expect("use_qk_norm", False)  # Command R+ has a norm with weights of its own for each head
    mixer = _attention(c, Heads.read(c), theta=5e5)
    return _model(c, [mixer] * c.get_layer_count())


def cohere2(c: Config) -> ModelSpec:
    """Command R7B and A: three local layers for each global one, which has no positions (arXiv:2504.00698)."""
    mixer = _attention(c, Heads.read(c), theta=1e4)
    period = c.get_size("sliding_window_pattern", 4)
    windows = layer_windows(c, lambda i: (i + 1) % period != 0, c.get_size("sliding_window", 4096, None))
    return _model(c, [replace(mixer, window=w, rope=mixer.rope if w else None) for w in windows])


def _attention(c: Config, heads: Heads, theta: float) -> Attention:
    bias = c.get_bool("attention_bias", False)
    rope = read_rope(c, heads.head_dim, Rotation(theta, interleaved=True))
    return attention(heads, rope, qkv_bias=bias, out_bias=bias)


def _model(c: Config, mixers: list[Attention]) -> ModelSpec:
    norm, mlp = LayerNorm(c.get_eps("layer_norm_eps", 1e-5), bias=False), gated_mlp(c)
    layers = tuple(ParallelLayer(mixer, mlp, norm, one_norm=True) for mixer in mixers)
    length = c.get_size("model_max_length", c.get_size("max_position_embeddings"))  # Command R was trained for more
    return decoder(c, layers, norm, tied=True, max_len=length, logit_scale=c.get_float("logit_scale", 0.0625))


# Fields that describe what the published code always does.
_FIXED = (
    "layer_switch", "order_of_interleaved_layers", "position_embedding_type", "rotary_pct", "use_embedding_sharing",
    "use_gated_activation", "use_parallel_block", "use_parallel_embedding", "use_qk_norm",
)  # fmt: skip
FAMILIES = (
    Family("cohere", cohere),
    Family("cohere2", cohere2, harmless=_FIXED),
)
