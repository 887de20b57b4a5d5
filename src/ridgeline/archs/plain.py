"""Dense families with parts of their own: Apertus (a learned activation), OLMo 1, nanochat and Nemotron (norms)."""

from __future__ import annotations

from dataclasses import replace

from ridgeline.archs.config import Config
from ridgeline.archs.family import Family, Heads, attention, decoder, gated_mlp, rms_norm
from ridgeline.archs.names import LLAMA
from ridgeline.archs.rope import Rotation, read_rope
from ridgeline.spec import MLP, XIELU, Layer, LayerNorm, ModelSpec, RMSNorm

# The published rotation, used if rope_parameters is absent or null.
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 12e6, "factor": 8.0, "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0, "high_freq_factor": 4.0,
}  # fmt: skip


def apertus(c: Config) -> ModelSpec:
    """Apertus 8B and 70B: an activation with learned numbers, norms of heads (arXiv:2509.14233)."""
    for name, value in (("qk_norm", True), ("post_norm", False), ("mlp_bias", False)):
        c.expect(name, value)
    heads, norm, bias = Heads.read(c), rms_norm(c, 1e-5), c.get_bool("attention_bias", False)
    rope = read_rope(c, heads.head_dim, Rotation(12e6, parameters=LLAMA3))
    mixer = attention(heads, rope, qkv_bias=bias, out_bias=bias, qk_norm=norm)
    is_learned = c.get_str("hidden_act", "xielu") == "xielu"
    mlp = MLP(c.get_size("intermediate_size"), XIELU() if is_learned else c.get_activation("hidden_act", "silu"))
    return decoder(c, (Layer(mixer, mlp, norm),) * c.get_layer_count(), norm)


def apertus1p5(c: Config) -> ModelSpec:
    """Apertus 1.5, the language model: Apertus, whose embedding also has tokens of images and sound."""
    spec, rows = apertus(c), c.get_size("vocab_size")
    written = c.get_size("output_vocab_size", rows, rows)
    if written > rows:
        raise c.error("output_vocab_size", f"is {written}; it must be at most vocab_size {rows}")
    if written < rows and spec.tie_word_embeddings:
        raise c.error(
            "output_vocab_size",
            f"is {written}, below vocab_size {rows}, and the head is tied, so it has all rows of the embedding; give "
            "both the same size, or set tie_word_embeddings to false",
        )
    return replace(spec, vocab_size=written, num_unwritten=rows - written)


def olmo(c: Config) -> ModelSpec:
    """OLMo 1B and 7B: layer norms without weights; some models limit queries, keys and values (arXiv:2402.00838)."""
    heads, norm = Heads.read(c), LayerNorm(1e-5, bias=False, weight=False)
    bias, clip = c.get_bool("attention_bias", False), c.get_positive("clip_qkv", None, None)
    mixer = attention(heads, read_rope(c, heads.head_dim), qkv_bias=bias, out_bias=bias, clip=clip)
    return decoder(c, (Layer(mixer, gated_mlp(c), norm),) * c.get_layer_count(), norm)


def nanochat(c: Config) -> ModelSpec:
    """nanochat: norms without weights, of embeddings and heads too; heads rotate backward; capped logits."""
    heads, norm, bias = Heads.read(c), RMSNorm(c.get_eps("rms_norm_eps", 1e-6), weight=False), _bias(c)
    rope = replace(read_rope(c, heads.head_dim), backward=True)
    mixer = attention(heads, rope, qkv_bias=bias, out_bias=bias, qk_norm=norm, norms_rotated=True)
    mlp = MLP(c.get_size("intermediate_size"), c.get_activation("hidden_act", "relu2"))
    cap = c.get_positive("final_logit_softcapping", 15.0, None)
    layers = (Layer(mixer, mlp, norm),) * c.get_layer_count()
    return replace(decoder(c, layers, norm, logit_softcap=cap), embed_norm=norm)


def _bias(c: Config) -> bool:
    return c.get_bool("attention_bias", False)


def nemotron(c: Config) -> ModelSpec:
    """Nemotron-4 and Minitron: layer norms stored as weight - 1, squared ReLU (arXiv:2402.16819)."""
    heads, norm, bias = (
        Heads.read(c, null_head_dim=True),
        LayerNorm(c.get_eps("norm_eps", 1e-5), offset=1.0),
        c.get_bool("attention_bias", False),
    )
    rope = read_rope(c, heads.head_dim, Rotation(partial=0.5))
    mixer = attention(heads, rope, qkv_bias=bias, out_bias=bias)
    mlp = MLP(c.get_size("intermediate_size"), c.get_activation("hidden_act", "relu2"), c.get_bool("mlp_bias", False))
    return decoder(c, (Layer(mixer, mlp, norm),) * c.get_layer_count(), norm)


APERTUS_NAMES = LLAMA.with_parts(
    parts={
        "mixer_norm": "attention_layernorm",
        "mlp_norm": "feedforward_layernorm",
        "mlp.xielu": "mlp.act_fn",
    },
    ignore=(*LLAMA.ignore, r"\.mlp\.act_fn\.(beta|eps)$"),  # constants of the class
)
NANOCHAT_NAMES = LLAMA.with_parts(parts={"mlp.up": "mlp.fc1", "mlp.down": "mlp.fc2"})
FAMILIES = (
    Family("apertus", apertus, APERTUS_NAMES),
    Family("apertus1p5_text", apertus1p5, APERTUS_NAMES),
    Family("olmo", olmo),
    Family("nanochat", nanochat, NANOCHAT_NAMES),
    Family("nemotron", nemotron),
)
