"""Describe a GGUF model as a config.json: one small function for each architecture of llama.cpp.

Keys of the architecture that nobody reads are an error, because ignoring one could change the model's outputs. Where a
key is absent, the values are llama.cpp's defaults.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from ridgeline.errors import CheckpointError
from ridgeline.load.gguf.facts import Facts
from ridgeline.load.gguf.rope import rope_fields

Config = dict[str, Any]


# Architectures that our specs could run, but whose tensors are not read from GGUF files.
_UNREAD: Mapping[str, str] = MappingProxyType({
    "deepseek2": "tensors of latent attention (attn_kv_b, or attn_k_b and attn_v_b) are read from safetensors only: "
    "open the safetensors of the model, a deepseek_v2 or deepseek_v3",
})  # fmt: skip


def config_of(facts: Facts) -> Config:
    """Return the config.json of a model.

    Raises CheckpointError for an unknown architecture, a key that is missing, has a wrong type or is not understood.
    """
    if why := _UNREAD.get(facts.architecture):
        raise CheckpointError(f"{facts.name}: general.architecture is {facts.architecture!r}: {why}")
    if facts.architecture not in _READERS:
        known = ", ".join(sorted(_READERS))
        raise CheckpointError(
            f"{facts.name}: general.architecture is {facts.architecture!r}, which is not supported; supported: {known}"
        )
    config = _READERS[facts.architecture](facts)
    facts.finish()
    return {**config, **_tokens(facts), "dtype": _dtype(facts)}


def _tokens(f: Facts) -> Config:
    """Return the ids of special tokens. Generation ends at each of the ends that the file names."""
    ends = [f.token(f"{name}_token_id") for name in ("eos", "eot", "eom")]
    ids = {
        "bos_token_id": f.token("bos_token_id"),
        "eos_token_id": list(dict.fromkeys(i for i in ends if i is not None)),
    }
    return {name: value for name, value in ids.items() if value not in (None, [])}


def _dtype(f: Facts) -> str:
    """Return the type in which the matrices are read: that of all of them, or float32."""
    types = {t.type.name for t in f.tensors.values() if len(t.shape) > 1}
    return {frozenset({"F16"}): "float16", frozenset({"BF16"}): "bfloat16"}.get(frozenset(types), "float32")


def _base(f: Facts) -> Config:
    heads, hidden = f.number("attention.head_count"), f.number("embedding_length")
    head_dim = f.number("attention.key_length", hidden // max(heads, 1))
    f.expect("attention.value_length", head_dim)
    return {
        "vocab_size": f.vocab_size, "hidden_size": hidden, "num_hidden_layers": f.number("block_count"),
        "intermediate_size": f.number("feed_forward_length"), "num_attention_heads": heads,
        "num_key_value_heads": f.number("attention.head_count_kv", heads), "head_dim": head_dim,
        "max_position_embeddings": f.number("context_length"),
        "rms_norm_eps": f.real("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in f.tensors,
    }  # fmt: skip


def _whole_heads(f: Facts) -> Config:
    """Return the common fields of models that rotate whole heads."""
    config = _base(f)
    f.expect("rope.dimension_count", config["head_dim"])
    return {**config, **rope_fields(f, config["head_dim"], config["max_position_embeddings"])}


def _biases(f: Facts) -> Config:
    return {"attention_bias": "blk.0.attn_q.bias" in f.tensors, "mlp_bias": "blk.0.ffn_down.bias" in f.tensors}


def _llama(f: Facts) -> Config:
    config, experts = _whole_heads(f), f.number("expert_count", 0)
    window = f.number("attention.sliding_window", 0)
    if experts:
        f.expect("expert_feed_forward_length", config["intermediate_size"])
        used = f.number("expert_used_count")
        moe = {"num_local_experts": experts, "num_experts_per_tok": used, "sliding_window": window or None}
        return {"model_type": "mixtral", **config, **moe}
    f.expect("expert_used_count", 0)
    if window:
        return {"model_type": "mistral", **config, "sliding_window": window}
    return {"model_type": "llama", **config, **_biases(f)}


def _qwen2(f: Facts) -> Config:
    return {"model_type": "qwen2", **_whole_heads(f), "use_sliding_window": False}


def _qwen3(f: Facts) -> Config:
    return {"model_type": "qwen3", **_whole_heads(f), "attention_bias": _biases(f)["attention_bias"]}


def _qwen3moe(f: Facts) -> Config:
    return {
        "model_type": "qwen3_moe", **_whole_heads(f), "attention_bias": _biases(f)["attention_bias"],
        "num_experts": f.number("expert_count"), "num_experts_per_tok": f.number("expert_used_count"),
        "moe_intermediate_size": f.number("expert_feed_forward_length"), "norm_topk_prob": True,
    }  # fmt: skip


def _smollm3(f: Facts) -> Config:
    return {"model_type": "smollm3", **_whole_heads(f), **_biases(f), "no_rope_layer_interval": 4}


def _granite(f: Facts) -> Config:
    config = _whole_heads(f)
    f.expect("rope.scaling.finetuned", True)  # false means no positions at all
    return {
        "model_type": "granite", **config, **_biases(f),
        "attention_multiplier": f.real("attention.scale", 0.0) or config["head_dim"] ** -0.5,
        "embedding_multiplier": f.real("embedding_scale", 0.0) or 1.0,
        "residual_multiplier": f.real("residual_scale", 0.0) or 1.0,
        "logits_scaling": f.real("logit_scale", 0.0) or 1.0,
    }  # fmt: skip


def _granitemoe(f: Facts) -> Config:
    config, shared = _granite(f), f.number("expert_shared_feed_forward_length", 0)
    config.pop("mlp_bias")
    moe = {"num_local_experts": f.number("expert_count"), "num_experts_per_tok": f.number("expert_used_count")}
    if shared:
        return {**config, **moe, "model_type": "granitemoeshared", "shared_intermediate_size": shared}
    return {**config, **moe, "model_type": "granitemoe"}


def _phi3(f: Facts) -> Config:
    config = _base(f)
    rotated = f.number("rope.dimension_count", config["head_dim"])
    trained = f.number("rope.scaling.original_context_length", config["max_position_embeddings"])
    return {
        "model_type": "phi3", **config, **rope_fields(f, rotated, config["max_position_embeddings"]),
        "partial_rotary_factor": rotated / config["head_dim"], "original_max_position_embeddings": trained,
        "sliding_window": f.number("attention.sliding_window", 0) or None,
    }  # fmt: skip


def _gemma_scale(config: Config, large: int) -> Config:
    """Return the number under the root of the attention scale: the head size, but for the largest model of a family
    the hidden size for each head. The files do not say.
    """
    by_hidden = config["num_hidden_layers"] == large
    scalar = config["hidden_size"] // config["num_attention_heads"] if by_hidden else config["head_dim"]
    return {"query_pre_attn_scalar": scalar, "hidden_activation": "gelu_pytorch_tanh"}


def _gemma2(f: Facts) -> Config:
    config = _whole_heads(f)
    return {
        "model_type": "gemma2", **config, **_gemma_scale(config, 46),
        "attn_logit_softcapping": f.real("attn_logit_softcapping", 50.0) or None,
        "final_logit_softcapping": f.real("final_logit_softcapping", 30.0) or None,
        "sliding_window": f.number("attention.sliding_window", 4096),
        "layer_types": f.layer_types(config["num_hidden_layers"], 2),
    }  # fmt: skip


def _gemma3(f: Facts) -> Config:
    config, window = _base(f), f.number("attention.sliding_window", 0)
    f.expect("rope.dimension_count", config["head_dim"])
    layers, length = config["num_hidden_layers"], config["max_position_embeddings"]
    local = {"rope_type": "default", "rope_theta": f.real("rope.freq_base_swa", 10_000.0)}
    whole = rope_fields(f, config["head_dim"], length)["rope_parameters"]
    return {
        "model_type": "gemma3_text", **config, **_gemma_scale(config, 62),
        "final_logit_softcapping": f.real("final_logit_softcapping", 0.0) or None,
        "sliding_window": window or 4096,
        "layer_types": f.layer_types(layers, 6) if window else ["full_attention"] * layers,
        "rope_parameters": {"full_attention": whole, "sliding_attention": local},
    }  # fmt: skip


def _olmo2(f: Facts) -> Config:
    config, window = _whole_heads(f), f.number("attention.sliding_window", 0)
    if not window:
        return {"model_type": "olmo2", **config}
    whole = config.pop("rope_parameters")
    local = {"rope_type": "default", "rope_theta": f.real("rope.freq_base_swa", whole["rope_theta"])}
    return {
        "model_type": "olmo3", **config, "sliding_window": window,
        "layer_types": f.layer_types(config["num_hidden_layers"], 4),
        "rope_parameters": {"full_attention": whole, "sliding_attention": local},
    }  # fmt: skip


def _glm4(f: Facts) -> Config:
    config = _base(f)
    rotated = f.number("rope.dimension_count", config["head_dim"] // 2)
    rope = rope_fields(f, rotated, config["max_position_embeddings"])
    rope["rope_parameters"]["partial_rotary_factor"] = rotated / config["head_dim"]
    return {"model_type": "glm4", **config, **rope, "attention_bias": _biases(f)["attention_bias"]}


def _gpt_oss(f: Facts) -> Config:
    """Return the config of gpt-oss. The files do not say that its YaRN truncates nothing, nor the limit of its gate."""
    config = _whole_heads(f)
    if config["rope_parameters"]["rope_type"] == "yarn":
        config["rope_parameters"]["truncate"] = False
    f.expect("rope.freq_base_swa", config["rope_parameters"]["rope_theta"])
    return {
        "model_type": "gpt_oss", **config, "attention_bias": _biases(f)["attention_bias"],
        "intermediate_size": f.number("expert_feed_forward_length"), "num_local_experts": f.number("expert_count"),
        "num_experts_per_tok": f.number("expert_used_count"), "sliding_window": f.number("attention.sliding_window"),
        "layer_types": f.layer_types(config["num_hidden_layers"], 2),
    }  # fmt: skip


def _gpt2(f: Facts) -> Config:
    heads, hidden = f.number("attention.head_count"), f.number("embedding_length")
    f.expect("attention.head_count_kv", heads)
    for name in ("attention.key_length", "attention.value_length"):
        f.expect(name, hidden // max(heads, 1))
    return {
        "model_type": "gpt2", "vocab_size": f.vocab_size, "n_embd": hidden, "n_head": heads,
        "n_layer": f.number("block_count"), "n_positions": f.number("context_length"),
        "n_inner": f.number("feed_forward_length"), "activation_function": "gelu_new",
        "layer_norm_epsilon": f.real("attention.layer_norm_epsilon"),
        "tie_word_embeddings": "output.weight" not in f.tensors,
    }  # fmt: skip


def _mamba(f: Facts) -> Config:
    f.expect("ssm.dt_b_c_rms", False)
    f.expect("feed_forward_length", 0)
    f.expect("attention.head_count", 0)
    f.skip("context_length")  # the state sets no limit
    return {
        "model_type": "mamba", "vocab_size": f.vocab_size, "hidden_size": f.number("embedding_length"),
        "num_hidden_layers": f.number("block_count"), "conv_kernel": f.number("ssm.conv_kernel"),
        "state_size": f.number("ssm.state_size"), "time_step_rank": f.number("ssm.time_step_rank"),
        "intermediate_size": f.number("ssm.inner_size"), "hidden_act": "silu",
        "layer_norm_epsilon": f.real("attention.layer_norm_rms_epsilon"),
        "use_bias": "blk.0.ssm_in.bias" in f.tensors, "use_conv_bias": "blk.0.ssm_conv1d.bias" in f.tensors,
        "tie_word_embeddings": "output.weight" not in f.tensors,
    }  # fmt: skip


_READERS: Mapping[str, Callable[[Facts], Config]] = MappingProxyType({
    "llama": _llama, "qwen2": _qwen2, "qwen3": _qwen3, "qwen3moe": _qwen3moe, "smollm3": _smollm3,
    "granite": _granite, "granitemoe": _granitemoe, "phi3": _phi3, "gemma2": _gemma2, "gemma3": _gemma3,
    "olmo2": _olmo2, "glm4": _glm4, "gpt-oss": _gpt_oss, "gpt2": _gpt2, "mamba": _mamba,
})  # fmt: skip
