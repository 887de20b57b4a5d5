"""GPT-2 and GPT-NeoX: layer norms with biases, plain MLPs, fused q, k and v."""

from __future__ import annotations

from dataclasses import replace

from ridgeline.archs.config import Config
from ridgeline.archs.family import Family, Heads, attention, decoder
from ridgeline.archs.names import FusedRows, HeadPart, Names, Tensor
from ridgeline.archs.rope import Rotation, read_rope
from ridgeline.spec import MLP, AnyLayer, Layer, LayerNorm, ModelSpec, ParallelLayer


def gpt2(c: Config) -> ModelSpec:
    """GPT-2: learned position embeddings, tied head (Radford et al. 2019)."""
    hidden, heads, positions = c.get_size("n_embd"), c.get_size("n_head"), c.get_size("n_positions")
    c.expect("n_ctx", positions)
    if hidden % heads:
        raise c.error("n_embd", f"is not a multiple of n_head {heads}")
    norm, sizes = LayerNorm(c.get_eps("layer_norm_epsilon", 1e-5)), Heads(heads, heads, hidden // heads)
    mlp = MLP(
        c.get_size("n_inner", 4 * hidden, 4 * hidden), c.get_activation("activation_function", "gelu_new"), bias=True
    )
    scale = sizes.head_dim**-0.5 if c.get_bool("scale_attn_weights", True) else 1.0
    by_depth = c.get_bool("scale_attn_by_inverse_layer_idx", False)

    def layer(i: int) -> Layer:
        shrink = i + 1 if by_depth else 1
        return Layer(attention(sizes, None, qkv_bias=True, out_bias=True, scale=scale / shrink), mlp, norm)

    return ModelSpec(
        family=c.model_type,
        vocab_size=c.get_size("vocab_size"),
        hidden_size=hidden,
        max_position_embeddings=positions,
        layers=tuple(map(layer, range(c.get_layer_count("n_layer")))),
        norm=norm,
        tie_word_embeddings=c.get_bool("tie_word_embeddings", True),
        num_position_embeddings=positions,
    )


def gpt_neox(c: Config) -> ModelSpec:
    """GPT-NeoX and Pythia: RoPE on a quarter of each head, and parallel branches (arXiv:2204.06745)."""
    count, hidden = c.get_size("num_attention_heads"), c.get_size("hidden_size")
    c.divide("hidden_size", hidden, "num_attention_heads", count)
    heads, norm = Heads(count, count, hidden // count), LayerNorm(c.get_eps("layer_norm_eps", 1e-5))
    bias = c.get_bool("attention_bias", True)
    rope = read_rope(
        c, heads.head_dim, Rotation(1e4, partial=0.25, theta_field="rotary_emb_base", partial_field="rotary_pct")
    )
    mixer = attention(heads, rope, qkv_bias=bias, out_bias=bias)
    mlp = MLP(c.get_size("intermediate_size"), c.get_activation("hidden_act", "gelu"), bias=True)
    parallel = c.get_bool("use_parallel_residual", True)
    layer: AnyLayer = ParallelLayer(mixer, mlp, norm) if parallel else Layer(mixer, mlp, norm)
    return decoder(c, (layer,) * c.get_layer_count(), norm)


def gpt_neox_japanese(c: Config) -> ModelSpec:
    """GPT-NeoX Japanese: no biases but one, on the result of the last layer's attention."""
    count, hidden = c.get_size("num_attention_heads"), c.get_size("hidden_size")
    c.divide("hidden_size", hidden, "num_attention_heads", count)
    heads, norm = Heads(count, count, hidden // count), LayerNorm(c.get_eps("layer_norm_eps", 1e-5))
    rotation = Rotation(1e4, partial=1.0, theta_field="rotary_emb_base", partial_field="rotary_pct")
    mixer = attention(heads, read_rope(c, heads.head_dim, rotation))
    size = hidden * c.get_size("intermediate_multiple_size", 4)
    mlp, layers = MLP(size, c.get_activation("hidden_act", "gelu")), c.get_layer_count()
    return decoder(
        c, tuple(Layer(replace(mixer, out_bias=i == layers - 1), mlp, norm) for i in range(layers)), norm, tied=True,
    )  # fmt: skip


_QKV = ("mixer.q", "mixer.k", "mixer.v")

GPT2_NAMES = Names(
    root={"embed": "wte", "position_embed": "wpe", "norm": "ln_f", "head": "lm_head"},
    layer="h.{i}.",
    parts={
        "mixer_norm": "ln_1",
        **{n: FusedRows("attn.c_attn", _QKV) for n in _QKV},
        "mixer.o": "attn.c_proj",
        "mlp_norm": "ln_2",
        "mlp.up": "mlp.c_fc",
        "mlp.down": "mlp.c_proj",
    },
    transposed=frozenset({"attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"}),
    ignore=(r"\.attn\.(masked_)?bias$",),
    optional_prefix="transformer.",
)

NEOX_NAMES = Names(
    root={"embed": "gpt_neox.embed_in", "norm": "gpt_neox.final_layer_norm", "head": "embed_out"},
    layer="gpt_neox.layers.{i}.",
    parts={
        "mixer_norm": "input_layernorm",
        **{n: HeadPart("attention.query_key_value", i, 3) for i, n in enumerate(_QKV)},
        "mixer.o": "attention.dense",
        "mlp_norm": "post_attention_layernorm",
        "mlp.up": "mlp.dense_h_to_4h",
        "mlp.down": "mlp.dense_4h_to_h",
    },
    ignore=(r"\.attention\.(masked_)?bias$", r"rotary_emb\.inv_freq$"),
)

JAPANESE_NAMES = NEOX_NAMES.with_parts(
    root={
        "embed": "gpt_neox_japanese.embed_in",
        "norm": "gpt_neox_japanese.final_layer_norm",
        "head": "embed_out",
    },
    layer="gpt_neox_japanese.layers.{i}.",
    parts={"mixer.o.bias": Tensor("attention.dense_bias")},
)

GPT2_HARMLESS = (
    "summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels", "summary_first_dropout",
    "reorder_and_upcast_attn",
)  # fmt: skip

FAMILIES = (
    Family("gpt2", gpt2, GPT2_NAMES, GPT2_HARMLESS),
    Family("gpt-sw3", gpt2, GPT2_NAMES, GPT2_HARMLESS),
    Family("gpt_neox", gpt_neox, NEOX_NAMES),
    Family("gpt_neox_japanese", gpt_neox_japanese, JAPANESE_NAMES),
)
