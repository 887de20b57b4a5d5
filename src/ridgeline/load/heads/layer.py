"""The decoder layer of EAGLE heads, which their configs describe as a Llama or Qwen 3 model of one layer."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any, NamedTuple, cast

from ridgeline.archs import FAMILIES
from ridgeline.archs.config import HARMLESS, Config
from ridgeline.errors import ConfigError, RequestError
from ridgeline.spec import (
    Attention,
    GatedMLP,
    Layer,
    LinearScaling,
    Llama3Scaling,
    RMSNorm,
    Rope,
    YarnScaling,
)
from ridgeline.spec.heads import EagleBase

FAMILY_NAMES = ("llama", "qwen3")  # families whose layers the formats' other readers have


class LayerFacts(NamedTuple):
    """The sizes and parts of a head's layer."""

    hidden_size: int
    vocab_size: int
    attention: Attention
    mlp: GatedMLP
    norm: RMSNorm
    max_position_embeddings: int

    def fields(self) -> dict[str, Any]:
        """Return the fields of an EAGLE spec."""
        return self._asdict()


def read_layer(c: Config, also: Collection[str] = ()) -> LayerFacts:
    """Return the layer that a config describes. Raises ConfigError for a field that is missing, unknown or wrong.

    also: fields that the format reads itself.
    """
    if c.model_type not in FAMILY_NAMES:
        raise c.error("model_type", f"is {c.model_type!r:.100}; a head's layer is one of {', '.join(FAMILY_NAMES)}")
    if (count := c.get_layer_count()) != 1:
        raise c.error("num_hidden_layers", f"is {count}; a head has one layer")
    c.get_bool("tie_word_embeddings", False)
    try:
        spec = FAMILIES[c.model_type].spec(c)
    except ValueError as e:
        raise ConfigError(f"config.json: {e}") from None
    layer = cast(Layer, spec.layers[0])  # the families in FAMILY_NAMES have layers of these kinds only
    mixer, mlp, norm = cast(Attention, layer.mixer), cast(GatedMLP, layer.mlp), cast(RMSNorm, spec.norm)
    if c.present("qkv_bias"):  # EAGLE's name for the biases of q, k and v alone
        mixer = replace(mixer, qkv_bias=c.get_bool("qkv_bias", False))
    c.finish(HARMLESS | set(also))
    return LayerFacts(spec.hidden_size, spec.vocab_size, mixer, mlp, norm, spec.max_position_embeddings)


def layer_config(head: EagleBase) -> dict[str, Any]:
    """Return the config of a head's layer, which `read_layer` reads as the same one.

    Raises RequestError for a layer that neither family can express.
    """
    facts = LayerFacts(
        head.hidden_size, head.vocab_size, head.attention, head.mlp, head.norm, head.max_position_embeddings
    )
    config = _fields(facts)
    try:
        found = read_layer(Config(config))
    except ConfigError as e:
        raise RequestError(f"no format of heads can hold this layer: {e}") from None
    if found != facts:
        wrong = next(name for name in LayerFacts._fields if getattr(found, name) != getattr(facts, name))
        raise RequestError(f"no format of heads can hold this layer: its {wrong} is none of Llama or Qwen 3")
    return config


def _fields(f: LayerFacts) -> dict[str, Any]:
    mixer = f.attention
    family = "qwen3" if mixer.qk_norm else "llama"
    config: dict[str, Any] = {
        "model_type": family,
        "vocab_size": f.vocab_size,
        "hidden_size": f.hidden_size,
        "intermediate_size": f.mlp.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": mixer.num_heads,
        "num_key_value_heads": mixer.num_kv_heads,
        "head_dim": mixer.head_dim,
        "hidden_act": f.mlp.activation,
        "rms_norm_eps": f.norm.eps,
        "attention_bias": mixer.out_bias,
        "tie_word_embeddings": False,
    }
    if mixer.qkv_bias != mixer.out_bias:
        config["qkv_bias"] = mixer.qkv_bias
    if family == "llama":
        config["mlp_bias"] = f.mlp.bias
    assert mixer.rope is not None
    return {**config, **_rope_fields(mixer.rope, f.max_position_embeddings)}


def _rope_fields(rope: Rope, length: int) -> dict[str, Any]:
    """Return the fields of a rotation in the spelling of transformers 4, which every reader of heads supports."""
    scaling: dict[str, Any] | None = None
    match rope.scaling:
        case LinearScaling(factor):
            scaling, length = {"rope_type": "linear", "factor": factor}, round(length / factor)
        case Llama3Scaling(factor, low, high, original):
            scaling = {"rope_type": "llama3", "factor": factor, "low_freq_factor": low, "high_freq_factor": high}
            scaling["original_max_position_embeddings"] = original
        case YarnScaling() as s:
            scaling = {
                "rope_type": "yarn", "factor": s.factor, "beta_fast": s.beta_fast, "beta_slow": s.beta_slow,
                "attention_factor": s.attention_factor, "truncate": s.truncate,
                "original_max_position_embeddings": s.original_max_position_embeddings,
            }  # fmt: skip
    fields: dict[str, Any] = {"max_position_embeddings": length, "rope_theta": rope.theta}
    return fields if scaling is None else {**fields, "rope_scaling": scaling}
