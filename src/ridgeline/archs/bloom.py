"""BLOOM and MPT: scores that fall with the distance of a key (ALiBi), in place of positions."""

from __future__ import annotations

from ridgeline.archs.config import HARMLESS, Config
from ridgeline.archs.family import Family, Heads, attention
from ridgeline.archs.names import FusedRows, HeadPart, Names
from ridgeline.spec import MLP, Layer, LayerNorm, ModelSpec


def bloom(c: Config) -> ModelSpec:
    """BLOOM and BLOOMZ: a norm of the embeddings (arXiv:2211.05100)."""
    c.rename({"n_embed": "hidden_size", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head"})
    hidden, heads = _sizes(c, "hidden_size", "n_head")
    c.expect("apply_residual_connection_post_layernorm", False, null=False)
    norm = LayerNorm(c.get_eps("layer_norm_epsilon", 1e-5))
    mixer = attention(heads, None, qkv_bias=True, out_bias=True, alibi=8.0)
    layer = Layer(mixer, MLP(4 * hidden, "gelu_tanh", bias=True), norm)
    return ModelSpec(
        family=c.model_type,
        vocab_size=c.get_size("vocab_size"),
        hidden_size=hidden,
        max_position_embeddings=c.get_size("seq_length", 2048),
        layers=(layer,) * c.get_layer_count("n_layer"),
        norm=norm,
        tie_word_embeddings=c.get_bool("tie_word_embeddings", True),
        embed_norm=norm,
    )


def mpt(c: Config) -> ModelSpec:
    """MPT 7B and 30B: no biases at all."""
    names = {"hidden_size": "d_model", "num_attention_heads": "n_heads", "num_hidden_layers": "n_layers"}
    c.rename(names)
    hidden, heads = _sizes(c, "d_model", "n_heads")
    c.expect("expansion_ratio", 4, null=False)
    c.expect("no_bias", True, null=False)
    c.expect("logit_scale")
    a = c.sub("attn_config") or c.inside("attn_config", {})
    for name, value in (("qk_ln", False), ("prefix_lm", False), ("attn_uses_sequence_id", False), ("alibi", True)):
        a.expect(name, value, null=False)
    a.expect("attn_type", "multihead_attention", null=False)
    a.expect("alibi_bias_max", 8, null=False)  # transformers ignores any other
    a.expect("clip_qkv")
    scale = a.get_positive("softmax_scale", heads.head_dim**-0.5, heads.head_dim**-0.5)
    mixer = attention(heads, None, scale=scale, alibi=8.0)
    a.finish(HARMLESS | {"attn_pdrop", "attn_impl"})
    norm = LayerNorm(c.get_eps("layer_norm_epsilon", 1e-5), bias=False)
    return ModelSpec(
        family=c.model_type,
        vocab_size=c.get_size("vocab_size"),
        hidden_size=hidden,
        max_position_embeddings=c.get_size("max_seq_len"),
        layers=(Layer(mixer, MLP(4 * hidden, "gelu"), norm),) * c.get_layer_count("n_layers"),
        norm=norm,
        tie_word_embeddings=c.get_bool("tie_word_embeddings", True),
    )


def _sizes(c: Config, width: str, count: str) -> tuple[int, Heads]:
    hidden, heads = c.get_size(width), c.get_size(count)
    c.divide(width, hidden, count, heads)
    return hidden, Heads(heads, heads, hidden // heads)


BLOOM_NAMES = Names(
    root={
        "embed": "word_embeddings",
        "embed_norm": "word_embeddings_layernorm",
        "norm": "ln_f",
        "head": "lm_head",
    },
    layer="h.{i}.",
    parts={
        "mixer_norm": "input_layernorm",
        **{f"mixer.{n}": HeadPart("self_attention.query_key_value", i, 3) for i, n in enumerate("qkv")},
        "mixer.o": "self_attention.dense",
        "mlp_norm": "post_attention_layernorm",
        "mlp.up": "mlp.dense_h_to_4h",
        "mlp.down": "mlp.dense_4h_to_h",
    },
    optional_prefix="transformer.",
)
_QKV = ("mixer.q", "mixer.k", "mixer.v")
MPT_NAMES = Names(
    root={"embed": "wte", "norm": "norm_f", "head": "lm_head"},
    layer="blocks.{i}.",
    parts={
        "mixer_norm": "norm_1",
        **{n: FusedRows("attn.Wqkv", _QKV) for n in _QKV},
        "mixer.o": "attn.out_proj",
        "mlp_norm": "norm_2",
        "mlp.up": "ffn.up_proj",
        "mlp.down": "ffn.down_proj",
    },
    optional_prefix="transformer.",
)

_BLOOM = (
    "attention_softmax_in_fp32", "bias_dropout_fusion", "masked_softmax_fusion", "offset_alibi", "skip_bias_add",
    "skip_bias_add_qkv", "slow_but_exact", "unk_token_id",
)  # fmt: skip
_MPT = (
    "emb_pdrop", "embedding_fraction", "init_config", "init_device", "learned_pos_emb", "norm_type", "resid_pdrop",
    "tokenizer_name", "verbose",
)  # fmt: skip
FAMILIES = (
    Family("bloom", bloom, BLOOM_NAMES, _BLOOM),
    Family("mpt", mpt, MPT_NAMES, _MPT),
)
