"""Convert a ModelSpec to a config.json, of a family that other programs support or in our own format."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from ridgeline.archs import OUR_MODEL_TYPE, spec_from_config
from ridgeline.errors import ConfigError
from ridgeline.spec import (
    Attention,
    GatedMLP,
    LatentAttention,
    Layer,
    LongRopeScaling,
    ModelSpec,
    RMSNorm,
    Rope,
    to_json,
)

CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


def config_of(spec: ModelSpec) -> dict[str, Any]:
    """Return a config that `spec_from_config` reads as this spec, except for the name of its family.

    It is the config of a family in CLASSES or of DeepSeek-V2, which transformers supports, if one can express the spec
    completely; otherwise it contains the spec itself.
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


def _sizes(
    spec: ModelSpec, mixer: Attention | LatentAttention, rope: Rope, mlp: GatedMLP, eps: float
) -> dict[str, Any]:
    """Return the fields that all of these families share. Every layer has this mixer and this mlp."""
    return {
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "intermediate_size": mlp.intermediate_size,
        "num_hidden_layers": len(spec.layers),
        "num_attention_heads": mixer.num_heads,
        "hidden_act": mlp.activation,
        "max_position_embeddings": spec.max_position_embeddings,
        "rms_norm_eps": eps,
        "rope_theta": rope.theta,
        "tie_word_embeddings": spec.tie_word_embeddings,
    }


def _candidates(spec: ModelSpec) -> Iterator[dict[str, Any]]:
    """Yield a config of each family that may express the spec: DeepSeek-V2 for latents, those of CLASSES for others."""
    layer = spec.layers[0]
    if not (isinstance(layer, Layer) and isinstance(layer.mlp, GatedMLP) and isinstance(spec.norm, RMSNorm)):
        return
    mixer = layer.mixer
    if not isinstance(mixer, Attention | LatentAttention) or mixer.rope is None:
        return
    sizes = _sizes(spec, mixer, mixer.rope, layer.mlp, spec.norm.eps)
    if isinstance(mixer, LatentAttention):
        yield sizes | _of_latents(len(spec.layers), mixer, mixer.rope, layer.mlp)
        return
    for model_type, name in CLASSES.items():
        yield sizes | {
            "architectures": [name],
            "model_type": model_type,
            "num_key_value_heads": mixer.num_kv_heads,
            "head_dim": mixer.head_dim,
            **({"attention_bias": mixer.qkv_bias} if model_type in ("llama", "qwen3") else {}),
            **({"sliding_window": mixer.window} if model_type == "mistral" else {}),
        }


def _of_latents(layers: int, mixer: LatentAttention, rope: Rope, mlp: GatedMLP) -> dict[str, Any]:
    """Return the fields of DeepSeek-V2 alone, whose layers are all dense. layers: their number."""
    return {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "num_key_value_heads": mixer.num_heads,
        "q_lora_rank": mixer.q_lora_rank,
        "kv_lora_rank": mixer.kv_lora_rank,
        "qk_nope_head_dim": mixer.qk_nope_head_dim,
        "qk_rope_head_dim": mixer.qk_rope_head_dim,
        "v_head_dim": mixer.v_head_dim,
        **_scaling(rope.scaling),
        "attention_bias": mixer.latent_bias,
        # No layer has experts, but programs read their fields.
        "first_k_dense_replace": layers,
        "moe_layer_freq": 1,
        "n_routed_experts": 1,
        "n_shared_experts": 0,
        "num_experts_per_tok": 1,
        "moe_intermediate_size": mlp.intermediate_size,
        "norm_topk_prob": False,
        "topk_method": "greedy",
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.0,
    }


def _scaling(scaling: object) -> dict[str, Any]:
    """Return the fields of a scaling that has a divisor for each frequency."""
    if not isinstance(scaling, LongRopeScaling):
        return {}
    return {
        "rope_scaling": {
            "rope_type": "longrope",
            "short_factor": list(scaling.short_factor),
            "long_factor": list(scaling.long_factor),
            "factor": 1.0,
            "attention_factor": scaling.attention_factor,
            "original_max_position_embeddings": scaling.original_max_position_embeddings,
        }
    }
