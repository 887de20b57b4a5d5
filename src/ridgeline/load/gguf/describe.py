"""Describe a model as the metadata of a GGUF file, with the keys of llama.cpp.

The metadata comes from the ModelSpec. Not every model can be described: the writer reads the file back and compares the
two specs, so that nothing is lost in silence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from ridgeline.archs.rope import yarn_temperature
from ridgeline.errors import ConfigError
from ridgeline.load.gguf.rope import llama3_divisors
from ridgeline.spec import (
    Attention,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    Mamba,
    ModelSpec,
    MoE,
    Rope,
    YarnScaling,
)

Fields = dict[str, Any]
# The families that can be written -> their architecture in llama.cpp.
WRITTEN: Mapping[str, str] = MappingProxyType({
    "llama": "llama", "mistral": "llama", "mixtral": "llama", "qwen2": "qwen2", "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe", "smollm3": "smollm3", "granite": "granite", "granitemoe": "granitemoe",
    "granitemoeshared": "granitemoe", "phi3": "phi3", "gemma2": "gemma2", "gemma3_text": "gemma3", "olmo2": "olmo2",
    "olmo3": "olmo2", "glm4": "glm4", "gpt_oss": "gpt-oss", "gpt2": "gpt2", "mamba": "mamba",
})  # fmt: skip


def metadata_of(config: Mapping[str, Any], spec: ModelSpec) -> tuple[str, Fields]:
    """Return the architecture and its keys, without its name before them. Raises ConfigError for other families."""
    if spec.family not in WRITTEN:
        known = ", ".join(sorted(WRITTEN))
        raise ConfigError(f"llama.cpp's format cannot hold a {spec.family} model; it can hold: {known}")
    if spec.family == "gemma2" and not spec.tie_word_embeddings:
        raise ConfigError("llama.cpp cannot hold a gemma2 model with an output head of its own")
    if spec.family == "gpt_oss" and (spec.tie_word_embeddings or not _has_biases(spec)):
        raise ConfigError(
            "llama.cpp cannot hold a gpt_oss model with a tied output head or without biases of attention"
        )
    architecture, length = WRITTEN[spec.family], config.get("max_position_embeddings", spec.max_position_embeddings)
    fields = {
        "vocab_size": spec.vocab_size, "context_length": length, "embedding_length": spec.hidden_size,
        "block_count": len(spec.layers), **_norm(spec),
    }  # fmt: skip
    mixer = spec.layers[0].mixer
    if isinstance(mixer, Mamba):
        fields |= _mamba(mixer)
    elif isinstance(mixer, Attention):
        fields |= {
            **_attention(spec, mixer),
            **_experts(spec),
            **(_EXTRA[architecture](spec) if architecture in _EXTRA else {}),
        }
    return architecture, fields


def ignored_by_llama_cpp(architecture: str, fields: Fields) -> tuple[str, ...]:
    """Return notes about what the file says and llama.cpp does not compute."""
    window, notes = fields.get("attention.sliding_window"), []
    if architecture in ("llama", "phi3") and window and window < fields["context_length"]:
        notes.append(
            f"llama.cpp ignores the sliding window of {window} tokens, so that its answers to longer texts differ"
        )
    if architecture == "olmo2" and "rope.freq_base_swa" in fields:
        notes.append("llama.cpp ignores the RoPE base of layers with a window, so that its answers differ")
    if architecture == "gpt-oss" and fields.get("rope.scaling.type") == "yarn":
        notes.append("llama.cpp rounds the dimensions between which YaRN blends, so that its answers differ slightly")
    return tuple(notes)


def _has_biases(spec: ModelSpec) -> bool:
    return all(layer.mixer.out_bias for layer in spec.layers if isinstance(layer.mixer, Attention))


def rope_tensors(spec: ModelSpec) -> dict[str, np.ndarray[Any, Any]]:
    """Return the tensors that describe a rotation: divisors of its frequencies, float32."""
    rope = _rope(spec)
    if rope is None or rope.scaling is None:
        return {}
    scaling = rope.scaling
    if isinstance(scaling, Llama3Scaling):
        divisors = llama3_divisors(
            rope.theta, rope.dim, scaling.factor, scaling.low_freq_factor, scaling.high_freq_factor,
            scaling.original_max_position_embeddings,
        )  # fmt: skip
        return {"rope_freqs.weight": divisors.astype(np.float32)}
    if isinstance(scaling, LongRopeScaling):
        both = (("long", scaling.long_factor), ("short", scaling.short_factor))
        return {f"rope_factors_{kind}.weight": np.array(values, np.float32) for kind, values in both}
    return {}


def _norm(spec: ModelSpec) -> Fields:
    name = "layer_norm_epsilon" if spec.family == "gpt2" else "layer_norm_rms_epsilon"
    return {f"attention.{name}": float(spec.norm.eps)}


def _attention(spec: ModelSpec, a: Attention) -> Fields:
    mlp = spec.layers[0].mlp
    fields: Fields = {
        "attention.head_count": a.num_heads, "attention.head_count_kv": a.num_kv_heads,
        "attention.key_length": a.head_dim, "attention.value_length": a.head_dim,
        "feed_forward_length": mlp.intermediate_size if mlp else 0,
    }  # fmt: skip
    windows = [layer.mixer.window if isinstance(layer.mixer, Attention) else None for layer in spec.layers]
    if any(windows):
        fields["attention.sliding_window"] = next(w for w in windows if w)
        if not all(windows):
            fields["attention.sliding_window_pattern"] = [w is not None for w in windows]
    if a.softcap:
        fields["attn_logit_softcapping"] = a.softcap
    if spec.logit_softcap:
        fields["final_logit_softcapping"] = spec.logit_softcap
    return {**fields, **_rotation(spec)}


def _rope(spec: ModelSpec) -> Rope | None:
    """Return the rotation of the layers without a window, or of the only kind of layers."""
    mixers = [layer.mixer for layer in spec.layers if isinstance(layer.mixer, Attention) and layer.mixer.rope]
    whole = [m for m in mixers if m.window is None] or mixers
    return whole[0].rope if whole else None


def _rotation(spec: ModelSpec) -> Fields:
    rope = _rope(spec)
    if rope is None:
        return {}
    fields: Fields = {"rope.dimension_count": rope.dim, "rope.freq_base": rope.theta}
    mixers = [layer.mixer for layer in spec.layers if isinstance(layer.mixer, Attention)]
    if local := [m.rope for m in mixers if m.window and m.rope and m.rope != rope]:
        fields["rope.freq_base_swa"] = local[0].theta
    match rope.scaling:
        case LinearScaling(factor):
            fields |= {"rope.scaling.type": "linear", "rope.scaling.factor": factor}
        case YarnScaling() as yarn:
            fields |= {
                "rope.scaling.type": "yarn", "rope.scaling.factor": yarn.factor,
                "rope.scaling.original_context_length": yarn.original_max_position_embeddings,
                "rope.scaling.attn_factor": yarn.attention_factor / yarn_temperature(yarn.factor, 1.0),
                "rope.scaling.yarn_beta_fast": yarn.beta_fast, "rope.scaling.yarn_beta_slow": yarn.beta_slow,
            }  # fmt: skip
        case LongRopeScaling() as long:
            fields |= {
                "rope.scaling.type": "longrope", "rope.scaling.attn_factor": long.attention_factor,
                "rope.scaling.original_context_length": long.original_max_position_embeddings,
            }  # fmt: skip
    return fields


def _experts(spec: ModelSpec) -> Fields:
    mlp = next((layer.mlp for layer in spec.layers if isinstance(layer.mlp, MoE)), None)
    if mlp is None:
        return {}
    fields: Fields = {"expert_count": mlp.num_experts, "expert_used_count": mlp.num_experts_per_tok}
    if spec.family in ("qwen3_moe", "gpt_oss"):
        fields["expert_feed_forward_length"] = mlp.intermediate_size
    if mlp.shared:
        fields["expert_shared_feed_forward_length"] = mlp.shared.intermediate_size
    return fields


def _granite(spec: ModelSpec) -> Fields:
    layer = spec.layers[0]
    scale = layer.mixer.scale if isinstance(layer.mixer, Attention) else 1.0
    return {
        "attention.scale": scale, "embedding_scale": spec.embedding_scale,
        "residual_scale": getattr(layer, "residual_scale", 1.0), "logit_scale": 1.0 / spec.logit_scale,
    }  # fmt: skip


def _gemma2(spec: ModelSpec) -> Fields:
    """Return the caps of scores. An absent field has a default, so a model without caps writes 0."""
    mixer = spec.layers[0].mixer
    softcap = mixer.softcap if isinstance(mixer, Attention) else None
    return {"attn_logit_softcapping": softcap or 0.0, "final_logit_softcapping": spec.logit_softcap or 0.0}


def _mamba(m: Mamba) -> Fields:
    return {
        "feed_forward_length": 0, "attention.head_count": 0, "ssm.conv_kernel": m.conv_size,
        "ssm.inner_size": m.inner_size, "ssm.state_size": m.state_size, "ssm.time_step_rank": m.dt_rank,
        "ssm.dt_b_c_rms": False,
    }  # fmt: skip


_EXTRA: Mapping[str, Callable[[ModelSpec], Fields]] = MappingProxyType(
    {"granite": _granite, "granitemoe": _granite, "gemma2": _gemma2}
)
