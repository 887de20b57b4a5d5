"""Dense families that differ from Llama in their MLP, norms or positions: Gemma 1, Arcee, Helium and others."""

from __future__ import annotations

from dataclasses import replace

from ridgeline.archs.config import Config
from ridgeline.archs.family import (
    Family,
    Heads,
    attention,
    decoder,
    gated_mlp,
    layer_windows,
    pre_norm_layers,
    rms_norm,
    whole_heads,
)
from ridgeline.archs.names import LLAMA
from ridgeline.archs.olmo import NAMES as POST_NORM_NAMES
from ridgeline.archs.rope import Rotation, read_rope
from ridgeline.spec import MLP, Attention, GatedMLP, Layer, LayerNorm, ModelSpec, RMSNorm


def gemma(c: Config) -> ModelSpec:
    """Gemma 1: norms stored as weight - 1, and scaled embeddings (arXiv:2403.08295)."""
    heads, norm = Heads.read(c, num_kv_heads=16, head_dim_default=256, null_kv=False), rms_norm(c, offset=1.0)
    bias, act = c.get_bool("attention_bias", False), c.get_activation("hidden_act", "gelu_pytorch_tanh")
    c.expect("use_bidirectional_attention", False)
    mixer = attention(heads, read_rope(c, heads.head_dim), qkv_bias=bias, out_bias=bias)
    mlp = GatedMLP(c.get_size("intermediate_size"), "gelu_tanh" if act == "gelu" else act)  # its first configs say gelu
    layers = pre_norm_layers(c, mixer, norm, mlp)
    return decoder(c, layers, norm, tied=True, embedding_scale=c.get_size("hidden_size") ** 0.5)


def arcee(c: Config) -> ModelSpec:
    """Arcee's AFM: MLPs without a gate, with squared ReLU (arXiv:2109.08668)."""
    heads, norm, bias = Heads.read(c, null_head_dim=True), rms_norm(c, 1e-5), c.get_bool("attention_bias", False)
    mixer = attention(heads, read_rope(c, heads.head_dim), qkv_bias=bias, out_bias=bias)
    mlp = MLP(c.get_size("intermediate_size"), c.get_activation("hidden_act", "relu2"), c.get_bool("mlp_bias", False))
    return decoder(c, (Layer(mixer, mlp, norm),) * c.get_layer_count(), norm)


def jais2(c: Config) -> ModelSpec:
    """Jais 2: MLPs without a gate, with squared ReLU; layer norms and biases."""
    heads, norm = Heads.read(c, null_head_dim=True), LayerNorm(c.get_eps("layer_norm_eps", 1e-5))
    qkv = c.get_bool("attention_bias", True)
    mixer = attention(heads, read_rope(c, heads.head_dim), qkv_bias=qkv, out_bias=qkv)
    mlp = MLP(c.get_size("intermediate_size"), c.get_activation("hidden_act", "relu2"), c.get_bool("mlp_bias", True))
    return decoder(c, (Layer(mixer, mlp, norm),) * c.get_layer_count(), norm)


def seed_oss(c: Config) -> ModelSpec:
    """Seed-OSS: biases on q, k and v, and a choice for o."""
    heads = Heads.read(c, num_kv_heads=8, head_dim_default=128, null_head_dim=True)
    norm, qkv, out = rms_norm(c), c.get_bool("attention_bias", True), c.get_bool("attention_out_bias", False)
    mixer = attention(heads, read_rope(c, heads.head_dim), qkv_bias=qkv, out_bias=out)
    return decoder(c, pre_norm_layers(c, mixer, norm, gated_mlp(c, bias=c.get_bool("mlp_bias", False))), norm)


def helium(c: Config) -> ModelSpec:
    """Helium: neighboring numbers of a head are rotated together."""
    heads = whole_heads(c, Heads.read(c, num_kv_heads=20, head_dim_default=128, null_kv=False))
    norm, bias = rms_norm(c, 1e-8), c.get_bool("attention_bias", False)
    rope = read_rope(c, heads.head_dim, Rotation(1e5, interleaved=True))
    mixer = attention(heads, rope, qkv_bias=bias)
    return decoder(c, pre_norm_layers(c, mixer, norm, gated_mlp(c, bias=c.get_bool("mlp_bias", False))), norm)


def ernie4_5(c: Config) -> ModelSpec:
    """ERNIE 4.5, dense: neighboring numbers of a head are rotated together, and all matrices may have biases."""
    heads, norm = Heads.read(c, num_kv_heads=2, head_dim_default=128, null_head_dim=True), rms_norm(c, 1e-5)
    bias = c.get_bool("use_bias", False)
    mixer = attention(
        heads, read_rope(c, heads.head_dim, Rotation(5e5, interleaved=True)), qkv_bias=bias, out_bias=bias
    )
    return decoder(c, pre_norm_layers(c, mixer, norm, gated_mlp(c, bias=bias)), norm, tied=True)


def starcoder2(c: Config) -> ModelSpec:
    """StarCoder 2: layer norms, plain MLPs, biases and a window (arXiv:2402.19173)."""
    heads, norm = Heads.read(c, num_kv_heads=2, null_kv=False), LayerNorm(c.get_eps("norm_epsilon", 1e-5))
    bias, window = c.get_bool("use_bias", True), c.get_size("sliding_window", None, None)
    mixer = attention(heads, read_rope(c, heads.head_dim), qkv_bias=bias, out_bias=bias, window=window)
    mlp = MLP(c.get_size("intermediate_size"), c.get_activation("hidden_act", "gelu_pytorch_tanh"), bias)
    return decoder(c, (Layer(mixer, mlp, norm),) * c.get_layer_count(), norm, tied=True)


def exaone4(c: Config) -> ModelSpec:
    """EXAONE 4: norms after each branch, norms of heads; with windows, global layers have no positions
    (arXiv:2507.11407).
    """
    norm, mlp = rms_norm(c, 1e-5), gated_mlp(c)
    return decoder(c, tuple(Layer(own, mlp, None, norm) for own in local_and_unrotated(c, norm)), norm)


def local_and_unrotated(c: Config, norm: RMSNorm) -> list[Attention]:
    """Return EXAONE 4's attention of each layer."""
    heads = Heads.read(c, num_kv_heads=32, null_kv=False)
    window, period = c.get_size("sliding_window", 4096, None), c.get_int("sliding_window_pattern", 4, 0)
    windows = layer_windows(c, lambda i: window is not None and bool(period) and (i + 1) % period != 0, window)
    mixer = attention(heads, read_rope(c, heads.head_dim), qk_norm=norm)
    return [replace(mixer, window=w, rope=mixer.rope if w or window is None else None) for w in windows]


STARCODER2_NAMES = LLAMA.with_parts(parts={"mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj"})

FAMILIES = (
    Family("gemma", gemma, harmless=("hidden_activation",)),
    Family("arcee", arcee),
    Family("jais2", jais2),
    Family("seed_oss", seed_oss, harmless=("residual_dropout",)),
    Family("helium", helium),
    Family("ernie4_5", ernie4_5),
    Family("starcoder2", starcoder2, STARCODER2_NAMES, harmless=("residual_dropout", "embedding_dropout")),
    Family("exaone4", exaone4, POST_NORM_NAMES),
)
