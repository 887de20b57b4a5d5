"""OPT, BioGPT, XGLM and GPT-Neo: tables of positions beside the usual fields."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ridgeline.archs.config import Config
from ridgeline.archs.family import Family, Heads, attention
from ridgeline.archs.names import Names
from ridgeline.spec import MLP, Layer, LayerNorm, ModelSpec

OPT_OFFSET = 2  # rows of the table of positions before the first one
KINDS = ("global", "local")


def opt(c: Config) -> ModelSpec:
    """OPT 125M, 1.3B to 66B (arXiv:2205.01068). OPT 350M has another arrangement and is refused."""
    hidden, heads, norm, bias = *_sizes(c, "num_attention_heads"), LayerNorm(1e-5), c.get_bool("enable_bias", True)
    c.expect("do_layer_norm_before", True, null=False)
    c.expect("_remove_final_layer_norm", False, null=False)
    c.expect("layer_norm_elementwise_affine", True, null=False)
    c.expect("word_embed_proj_dim", hidden)
    mixer = attention(heads, None, qkv_bias=bias, out_bias=bias)
    mlp = MLP(c.get_size("ffn_dim"), c.get_activation("activation_function", "relu"), bias)
    return _model(c, hidden, (Layer(mixer, mlp, norm),) * c.get_layer_count(), norm, OPT_OFFSET)


def biogpt(c: Config) -> ModelSpec:
    """BioGPT: OPT with scaled embeddings (Luo et al. 2022)."""
    hidden, heads = _sizes(c, "num_attention_heads")
    norm, mixer = LayerNorm(1e-5), attention(heads, None, qkv_bias=True, out_bias=True)
    mlp = MLP(c.get_size("intermediate_size"), c.get_activation("hidden_act", "gelu"), bias=True)
    spec = _model(c, hidden, (Layer(mixer, mlp, norm),) * c.get_layer_count(), norm, OPT_OFFSET)
    return replace(spec, embedding_scale=hidden**0.5 if c.get_bool("scale_embedding", True) else 1.0)


def gpt_neo(c: Config) -> ModelSpec:
    """GPT-Neo: every second layer has a window, and scores are not scaled."""
    hidden, heads = _sizes(c, "num_heads")
    norm, window = LayerNorm(c.get_eps("layer_norm_epsilon", 1e-5)), c.get_size("window_size", 256)
    size = c.get_size("intermediate_size", 4 * hidden, 4 * hidden)
    mlp = MLP(size, c.get_activation("activation_function", "gelu_new"), bias=True)
    count = c.get_layer_count("num_layers")
    kinds = _kinds(c, count)
    layers = tuple(
        Layer(attention(heads, None, out_bias=True, scale=1.0, window=window if kind == "local" else None), mlp, norm)
        for kind in kinds
    )
    return _model(c, hidden, layers, norm, 0)


def xglm(c: Config) -> ModelSpec:
    """XGLM: sines and cosines of positions, and scaled embeddings (arXiv:2112.10668)."""
    hidden, heads = _sizes(c, "attention_heads", "d_model")
    if (pad := c.get_int("pad_token_id", 1, None)) is not None and pad >= OPT_OFFSET:
        raise c.error("pad_token_id", f"is {pad}, whose row of the table of positions is zero; it must be below 2")
    norm, mixer = LayerNorm(1e-5), attention(heads, None, qkv_bias=True, out_bias=True)
    mlp = MLP(c.get_size("ffn_dim"), c.get_activation("activation_function", "gelu"), bias=True)
    spec = _model(c, hidden, (Layer(mixer, mlp, norm),) * c.get_layer_count("num_layers"), norm, OPT_OFFSET)
    scale = hidden**0.5 if c.get_bool("scale_embedding", True) else 1.0
    return replace(spec, embedding_scale=scale, sinusoids=True)


def _sizes(c: Config, name: str, width: str = "hidden_size") -> tuple[int, Heads]:
    hidden, count = c.get_size(width), c.get_size(name)
    c.divide(width, hidden, name, count)
    return hidden, Heads(count, count, hidden // count)


def _kinds(c: Config, count: int) -> list[str]:
    """Return the kind of each layer, from `attention_layers`, or from `attention_types` as [[kinds], times] pairs."""
    types: list[Any] = c.get_list("attention_types", [[list(KINDS), 12]], [[list(KINDS), 12]])
    found = [kind for kinds, times in map(_pair(c), types) for kind in kinds * times]
    given = c.get_choices("attention_layers", count, KINDS, null=False) or found
    if len(given) != count or any(kind not in KINDS for kind in given):
        raise c.error("attention_types", f"must hold {count} entries, each {' or '.join(map(repr, KINDS))}")
    return given


def _pair(c: Config) -> Any:
    def read(entry: Any) -> tuple[list[str], int]:
        match entry:
            case [[*kinds], int(times)] if 0 < times * len(kinds) <= 10_000:
                return kinds, times
        raise c.error("attention_types", f"holds {entry!r:.100}; each entry must be a list of kinds and a number")

    return read


def _model(c: Config, hidden: int, layers: tuple[Layer, ...], norm: LayerNorm, offset: int) -> ModelSpec:
    positions = c.get_size("max_position_embeddings")
    return ModelSpec(
        family=c.model_type,
        vocab_size=c.get_size("vocab_size"),
        hidden_size=hidden,
        max_position_embeddings=positions,
        layers=layers,
        norm=norm,
        tie_word_embeddings=c.get_bool("tie_word_embeddings", True),
        num_position_embeddings=positions + offset,
        position_offset=offset,
    )


OPT_NAMES = Names(
    root={
        "embed": "decoder.embed_tokens",
        "position_embed": "decoder.embed_positions",
        "norm": "decoder.final_layer_norm",
        "head": "lm_head",
    },
    layer="decoder.layers.{i}.",
    parts={
        "mixer_norm": "self_attn_layer_norm",
        **{f"mixer.{n}": f"self_attn.{n}_proj" for n in "qkv"},
        "mixer.o": "self_attn.out_proj",
        "mlp_norm": "final_layer_norm",
        "mlp.up": "fc1",
        "mlp.down": "fc2",
    },
    optional_prefix="model.",
)
BIOGPT_NAMES = OPT_NAMES.with_parts(
    root={
        "embed": "embed_tokens",
        "position_embed": "embed_positions",
        "norm": "layer_norm",
        "head": "output_projection",
    },
    layer="layers.{i}.",
    optional_prefix="biogpt.",
)
XGLM_NAMES = OPT_NAMES.with_parts(
    root={"embed": "embed_tokens", "norm": "layer_norm", "head": "lm_head"},
    layer="layers.{i}.",
    optional_prefix="model.",
    ignore=(r"^embed_positions\.",),
)
NEO_NAMES = Names(
    root={"embed": "wte", "position_embed": "wpe", "norm": "ln_f", "head": "lm_head"},
    layer="h.{i}.",
    parts={
        "mixer_norm": "ln_1",
        **{f"mixer.{n}": f"attn.attention.{n}_proj" for n in "qkv"},
        "mixer.o": "attn.attention.out_proj",
        "mlp_norm": "ln_2",
        "mlp.up": "mlp.c_fc",
        "mlp.down": "mlp.c_proj",
    },
    ignore=(r"\.attn\.attention\.(masked_)?bias$",),
    optional_prefix="transformer.",
)

_NEO_HARMLESS = (
    "summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels", "summary_first_dropout",
    "resid_dropout", "embed_dropout",
)  # fmt: skip
# The published code has nn.LayerNorm with its own default in place of layer_norm_eps.
_BIOGPT_HARMLESS = (
    "attention_probs_dropout_prob", "hidden_dropout_prob", "layerdrop", "activation_dropout", "layer_norm_eps",
)  # fmt: skip
FAMILIES = (
    Family("opt", opt, OPT_NAMES, ("dropout", "layerdrop", "init_std", "activation_dropout")),
    Family("biogpt", biogpt, BIOGPT_NAMES, _BIOGPT_HARMLESS),
    Family("xglm", xglm, XGLM_NAMES, ("dropout", "layerdrop", "init_std", "activation_dropout")),
    Family("gpt_neo", gpt_neo, NEO_NAMES, _NEO_HARMLESS),
)
