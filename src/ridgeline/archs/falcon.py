"""Falcon 7B, 40B, 180B and Falcon 2: parallel branches, and few heads of keys and values in one fused matrix."""

from __future__ import annotations

from dataclasses import replace

from ridgeline.archs.config import Config
from ridgeline.archs.family import Family, Heads, attention, decoder
from ridgeline.archs.names import Groups, Names
from ridgeline.archs.rope import read_rope
from ridgeline.spec import MLP, AnyLayer, Layer, LayerNorm, ModelSpec, ParallelLayer


def falcon(c: Config) -> ModelSpec:
    """Falcon (arXiv:2311.16867). Falcon RW, whose positions are a bias that is rounded to bfloat16, is refused."""
    c.rename({"n_embed": "hidden_size"})
    c.expect("alibi", False)
    hidden, count = c.get_size("hidden_size"), c.get_size("num_attention_heads")
    c.divide("hidden_size", hidden, "num_attention_heads", count)
    new, parallel = c.get_bool("new_decoder_architecture", False, False), c.get_bool("parallel_attn", True, False)
    several, one = c.get_size("num_kv_heads", count, count), c.get_bool("multi_query", True, False)
    kv_heads = several if new else 1 if one else count
    c.divide("num_attention_heads", count, "num_kv_heads", kv_heads)
    heads, norm = Heads(count, kv_heads, hidden // count), LayerNorm(c.get_eps("layer_norm_epsilon", 1e-5))
    bias = c.get_bool("bias", False, False)
    size = c.get_size("ffn_hidden_size", 4 * hidden, 4 * hidden)
    mixer = attention(heads, read_rope(c, heads.head_dim), qkv_bias=bias, out_bias=bias)
    mlp = MLP(size, c.get_activation("activation", "gelu"), bias)
    norms = c.get_int("num_ln_in_parallel_attn", None, None)
    layer: AnyLayer = Layer(mixer, mlp, norm)
    if parallel:
        layer = ParallelLayer(mixer, mlp, norm, one_norm=not new or norms == 1)
    elif new:
        raise c.error("parallel_attn", "is false, but new_decoder_architecture is true, which has parallel branches")
    if norms not in (None, 1, 2) or (norms == 2 and not new):
        raise c.error("num_ln_in_parallel_attn", f"is {norms}; supported: null, 1, and 2 in the new architecture")
    return decoder(c, (layer,) * c.get_layer_count(), norm, tied=True)


_QKV = ("mixer.q", "mixer.k", "mixer.v")
NAMES = Names(
    root={"embed": "transformer.word_embeddings", "norm": "transformer.ln_f", "head": "lm_head"},
    layer="transformer.h.{i}.",
    parts={
        "mixer_norm": "input_layernorm",
        **{n: Groups("self_attention.query_key_value", _QKV) for n in _QKV},
        "mixer.o": "self_attention.dense",
        "mlp_norm": "post_attention_layernorm",
        "mlp.up": "mlp.dense_h_to_4h",
        "mlp.down": "mlp.dense_4h_to_h",
    },
    ignore=(r"rotary_emb\.inv_freq$",),
)
TWO_NORMS = NAMES.with_parts(parts={"mixer_norm": "ln_attn", "mlp_norm": "ln_mlp"})

FAMILIES = (Family("falcon", falcon, replace(NAMES, others=(TWO_NORMS,))),)
