"""Phi 1 to 2, Persimmon and StableLM: layer norms, partial rotation, and branches that may be parallel."""

from __future__ import annotations

from ridgeline.archs.config import Config
from ridgeline.archs.family import Family, Heads, attention, decoder, gated_mlp, whole_heads
from ridgeline.archs.names import LLAMA, HeadPart
from ridgeline.archs.rope import Rotation, read_rope
from ridgeline.spec import MLP, AnyLayer, Layer, LayerNorm, ModelSpec, ParallelLayer, Rope


def phi(c: Config) -> ModelSpec:
    """Phi 1, 1.5 and 2: parallel branches, and biases on all matrices, the head included (arXiv:2309.05463)."""
    heads, norm = whole_heads(c, Heads.read(c)), LayerNorm(c.get_eps("layer_norm_eps", 1e-5))
    mixer = attention(
        heads, _rope(c, heads, 0.5), qkv_bias=True, out_bias=True,
        qk_norm=norm if c.get_bool("qk_layernorm", False) else None,
    )  # fmt: skip
    mlp = MLP(c.get_size("intermediate_size"), c.get_activation("hidden_act", "gelu_new"), bias=True)
    layer = ParallelLayer(mixer, mlp, norm, one_norm=True)
    return decoder(c, (layer,) * c.get_layer_count(), norm, head_bias=True)


def stablelm(c: Config) -> ModelSpec:
    """StableLM 3B, Zephyr and 2 1.6B (arXiv:2402.17834)."""
    heads = whole_heads(c, Heads.read(c, num_kv_heads=32, null_kv=False))
    norm = LayerNorm(c.get_eps("layer_norm_eps", 1e-5))
    c.expect("qk_layernorm", False, null=False)  # StableLM 2 12B has a norm with weights of its own for each head
    mixer, mlp = attention(heads, _rope(c, heads, 0.25), qkv_bias=c.get_bool("use_qkv_bias", False)), gated_mlp(c)
    parallel = c.get_bool("use_parallel_residual", False)
    layer: AnyLayer = ParallelLayer(mixer, mlp, norm, one_norm=True) if parallel else Layer(mixer, mlp, norm)
    return decoder(c, (layer,) * c.get_layer_count(), norm)


def persimmon(c: Config) -> ModelSpec:
    """Persimmon 8B: squared ReLU, layer norms of heads, and one matrix for q, k and v."""
    count, hidden = c.get_size("num_attention_heads"), c.get_size("hidden_size")
    c.divide("hidden_size", hidden, "num_attention_heads", count)
    heads, norm = Heads(count, count, hidden // count), LayerNorm(c.get_eps("layer_norm_eps", 1e-5))
    mixer = attention(
        heads, _rope(c, heads, 0.5), qkv_bias=True, out_bias=True,
        qk_norm=norm if c.get_bool("qk_layernorm", True) else None,
    )  # fmt: skip
    mlp = MLP(c.get_size("intermediate_size"), c.get_activation("hidden_act", "relu2"), bias=True)
    return decoder(c, (Layer(mixer, mlp, norm),) * c.get_layer_count(), norm)


def _rope(c: Config, heads: Heads, partial: float) -> Rope:
    """Return the rotation. partial: default share of a head. Raises ConfigError for an odd number of elements."""
    rope = read_rope(c, heads.head_dim, Rotation(partial=partial))
    if rope.odd:
        raise c.error(
            "partial_rotary_factor", f"rotates {rope.period} numbers of a head, so it must be even; change it"
        )
    return rope


PHI_NAMES = LLAMA.with_parts(
    root={"embed": "model.embed_tokens", "norm": "model.final_layernorm", "head": "lm_head"},
    parts={
        "mixer.o": "self_attn.dense",
        "mixer.q_norm": "self_attn.q_layernorm",
        "mixer.k_norm": "self_attn.k_layernorm",
        "mlp.up": "mlp.fc1",
        "mlp.down": "mlp.fc2",
    },
)
PERSIMMON_NAMES = PHI_NAMES.with_parts(
    parts={
        **{f"mixer.{n}": HeadPart("self_attn.query_key_value", i, 3) for i, n in enumerate("qkv")},
        "mlp_norm": "post_attention_layernorm",
        "mlp.up": "mlp.dense_h_to_4h",
        "mlp.down": "mlp.dense_4h_to_h",
    },
)
FAMILIES = (
    Family("phi", phi, PHI_NAMES),
    Family("persimmon", persimmon, PERSIMMON_NAMES),
    Family("stablelm", stablelm),
)
