"""Convert a ModelSpec to a config.json, of a family that other programs support or in our own format."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from ridgeline.archs import OUR_MODEL_TYPE, spec_from_config
from ridgeline.errors import ConfigError
from ridgeline.spec import Attention, GatedMLP, Layer, ModelSpec, RMSNorm, to_json

CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


def config_of(spec: ModelSpec) -> dict[str, Any]:
    """Return a config that `spec_from_config` reads as this spec, except for the name of its family.

    It is the config of a family in CLASSES, which transformers supports, if one can express the spec completely;
    otherwise it contains the spec itself.
    """
    for config in _candidates(spec):
        if reads_as(config, spec):
            return config
    return {"model_type": OUR_MODEL_TYPE, "spec": to_json(spec)}


def reads_as(config: Mapping[str, Any], spec: ModelSpec) -> bool:
    """Return whether a config describes this spec, apart from the name of its family."""
    try:
        return replace(spec_from_config(config), family=spec.family) == spec
    except ConfigError:
        return False


def _candidates(spec: ModelSpec) -> Iterator[dict[str, Any]]:
    layer = spec.layers[0]
    if not (isinstance(layer, Layer) and isinstance(layer.mixer, Attention) and isinstance(layer.mlp, GatedMLP)):
        return
    mixer, mlp = layer.mixer, layer.mlp
    if mixer.rope is None or not isinstance(spec.norm, RMSNorm):
        return
    for model_type, name in CLASSES.items():
        yield {
            "architectures": [name],
            "model_type": model_type,
            "vocab_size": spec.vocab_size,
            "hidden_size": spec.hidden_size,
            "intermediate_size": mlp.intermediate_size,
            "num_hidden_layers": len(spec.layers),
            "num_attention_heads": mixer.num_heads,
            "num_key_value_heads": mixer.num_kv_heads,
            "head_dim": mixer.head_dim,
            "hidden_act": mlp.activation,
            "max_position_embeddings": spec.max_position_embeddings,
            "rms_norm_eps": spec.norm.eps,
            "rope_theta": mixer.rope.theta,
            "tie_word_embeddings": spec.tie_word_embeddings,
            **({"attention_bias": mixer.qkv_bias} if model_type in ("llama", "qwen3") else {}),
            **({"sliding_window": mixer.window} if model_type == "mistral" else {}),
        }
