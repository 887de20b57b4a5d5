"""A field that a config leaves out has the default of transformers' class for that family.

Many programs write configs, and they omit fields with the default of the class that they use. So the classes are the
oracle: a config must give the same spec whether they fill it in or not.
"""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING

from ridgeline.archs import FAMILIES, spec_from_config
from ridgeline.errors import ConfigError
from ridgeline.spec import ModelSpec

# Fields that no class can guess. The default number of KV heads of every class divides 64 heads; 24 is no class's
# default head size; the number of layers is enough for every rule that counts them, including Qwen's 28.
SIZES: dict[str, Any] = {
    "vocab_size": 1000,
    "hidden_size": 64 * 24,
    "intermediate_size": 3000,
    "num_hidden_layers": 30,
    "num_attention_heads": 64,
    "max_position_embeddings": 12_000,
}
MORE: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 6, "num_experts_per_tok": 3},
    "qwen3_moe": {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 500},
    "gpt_oss": {"num_local_experts": 6, "num_experts_per_tok": 3},
    "deepseek_v2": {"num_experts_per_tok": 3},
    "lfm2_moe": {"layer_types": ["conv"] * 30},
    "dots1": {"n_routed_experts": 6, "num_experts_per_tok": 3, "n_shared_experts": 2},
    "helium": {"num_attention_heads": 60, "hidden_size": 60 * 128},  # its defaults are 20 KV heads of 128 numbers
}
GPT2 = {"vocab_size": 1000, "n_embd": 64 * 24, "n_layer": 30, "n_head": 64, "n_positions": 12_000}
INSTEAD: dict[str, dict[str, Any]] = {
    "mamba": {"vocab_size": 1000, "hidden_size": 64 * 24, "num_hidden_layers": 30},
    "falcon_mamba": {"vocab_size": 1000, "hidden_size": 64 * 24, "num_hidden_layers": 30},
    "mamba2": {
        "vocab_size": 1000,
        "hidden_size": 64 * 24,
        "num_hidden_layers": 30,
        "num_heads": 64,
        "head_dim": 48,
    },
    "qwen3_5": {"text_config": SIZES},
    "qwen3_5_moe": {"text_config": SIZES},
    "gemma3": {"text_config": SIZES},
    "mistral3": {"text_config": {"model_type": "ministral3", **SIZES}, "tie_word_embeddings": False},
    **{key: {"text_config": SIZES} for key in ("gemma4", "gemma4_unified", "llama4")},
    "cohere_compass_text": SIZES | {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 5e4}}},
    "lara_mini": {name: size for name, size in SIZES.items() if name != "intermediate_size"},
    "diffusion_gemma": {"text_config": {**SIZES, "num_experts": 6, "top_k_experts": 3, "moe_intermediate_size": 500}},
    "nemotron_h": {
        "vocab_size": 1000,
        "hidden_size": 64 * 24,
        "layers_block_type": ["linear_attention", "mlp", "full_attention", "moe"],
    },
    **dict.fromkeys(("gpt2", "gpt-sw3"), GPT2),
    **dict.fromkeys(("gpt_bigcode",), GPT2),
    **dict.fromkeys(("gptj", "codegen"), GPT2 | {"n_head": 16, "n_positions": 2048}),
    "falcon": {name: size for name, size in SIZES.items() if name != "intermediate_size"},
    "gpt_neox_japanese": {name: size for name, size in SIZES.items() if name != "intermediate_size"},
    "kolibri1": {name: size for name, size in SIZES.items() if name != "intermediate_size"},
    "bloom": {"vocab_size": 1000, "hidden_size": 64 * 24, "n_layer": 30, "n_head": 64},
    "mpt": {"vocab_size": 1000, "d_model": 64 * 24, "n_layers": 30, "n_heads": 64, "max_seq_len": 12_000},
    "opt": {name: size for name, size in SIZES.items() if name != "intermediate_size"} | {"ffn_dim": 3000},
    "longcat_flash": {
        "vocab_size": 1000,
        "hidden_size": 64 * 24,
        "ffn_hidden_size": 3000,
        "num_layers": 15,
        "num_attention_heads": 64,
        "max_position_embeddings": 12_000,
    },
    "dbrx": {"vocab_size": 1000, "d_model": 64 * 24, "n_heads": 64, "n_layers": 30, "max_seq_len": 12_000},
    "xglm": {
        "vocab_size": 1000,
        "d_model": 64 * 24,
        "ffn_dim": 3000,
        "num_layers": 30,
        "attention_heads": 64,
        "max_position_embeddings": 12_000,
    },
    "gpt_neo": {
        "vocab_size": 1000,
        "hidden_size": 64 * 24,
        "num_layers": 24,
        "num_heads": 64,
        "max_position_embeddings": 12_000,
    },
}
# Families with a model type that transformers has; the others are spellings of these.
NAMED = [name for name in FAMILIES if name in CONFIG_MAPPING and CONFIG_MAPPING[name].model_type == name]
# Sizes that a class saves under another name than the one it was given.
WRITTEN_AS = {"num_local_experts", "model_max_length"}
YARN = {"rope_type": "yarn", "factor": 4.0}
# Flags that switch on a feature whose own fields are then left out.
SWITCHES: list[tuple[str, dict[str, Any]]] = [
    *((name, {"use_sliding_window": True}) for name in ("qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "smollm3")),
    ("smollm3", {"use_sliding_window": True, "sliding_window": 100}),
    ("qwen2", {"use_sliding_window": True, "max_window_layers": 5}),
    *(("llama", {"rope_scaling": scaling}) for scaling in (YARN, {**YARN, "original_max_position_embeddings": 3000})),
    ("olmo3", {"rope_scaling": YARN}),
    *(("gpt_oss", {"rope_scaling": scaling}) for scaling in (YARN, {"rope_type": "default"}, None)),
    *((name, {"rope_scaling": YARN}) for name in ("deepseek_v2", "deepseek_v3")),
    ("deepseek_v2", {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2}),
    ("gemma3_text", {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}),
    *((name, {"rope_parameters": {"rope_theta": 5e5}}) for name in ("smollm3", "glm4", "gpt_neox", "phi3")),
]


def sizes(model_type: str) -> dict[str, Any]:
    """Return the smallest config of a family."""
    return INSTEAD.get(model_type, {**SIZES, **MORE.get(model_type, {})})


def filled(model_type: str, given: dict[str, Any]) -> dict[str, Any]:
    """Return a config with every field, as transformers' class fills it in and writes it."""
    copy = json.loads(json.dumps(given), object_hook=_infinity)  # classes modify their arguments
    return json.loads(CONFIG_MAPPING[model_type](**copy).to_json_string(use_diff=False))


def read(config: dict[str, Any]) -> ModelSpec | None:
    """Return the spec, or None if the config is refused: a null that the class accepts and its model does not."""
    try:
        return spec_from_config(config)
    except ConfigError:
        return None


def _infinity(value: dict[str, Any]) -> Any:
    """Convert the infinity that the classes write but cannot read."""
    return math.inf if value == {"__float__": "Infinity"} else value


@pytest.mark.parametrize("model_type", NAMED)
def test_sizes_alone(model_type: str) -> None:
    given = sizes(model_type)
    assert spec_from_config({"model_type": model_type, **given}) == spec_from_config(filled(model_type, given))


@pytest.mark.parametrize(("model_type", "switch"), SWITCHES, ids=lambda x: x if isinstance(x, str) else "-".join(x))
def test_sizes_and_a_switch(model_type: str, switch: dict[str, Any]) -> None:
    given = {**sizes(model_type), **switch}
    assert spec_from_config({"model_type": model_type, **given}) == spec_from_config(filled(model_type, given))


def optional_fields(model_type: str) -> list[str]:
    given = sizes(model_type)
    return sorted(set(filled(model_type, given)) - set(given) - WRITTEN_AS - {"model_type"})


@pytest.mark.parametrize("model_type", NAMED)
def test_each_field_left_out(model_type: str) -> None:
    """Leave out one field of a full config at a time: its default must not depend on other fields unless it does in
    transformers.
    """
    whole, different = filled(model_type, sizes(model_type)), []
    for field in optional_fields(model_type):
        rest = {key: value for key, value in whole.items() if key != field}
        if spec_from_config(rest) != spec_from_config(filled(model_type, rest)):
            different.append(field)
    assert not different


@pytest.mark.parametrize("model_type", NAMED)
def test_each_field_null(model_type: str) -> None:
    """A null has the meaning that the class gives it, which may differ from an absent field."""
    compared, different = 0, []
    for field in optional_fields(model_type):
        given = {**sizes(model_type), field: None}
        try:
            whole = filled(model_type, given)
        except (StrictDataclassError, TypeError, ZeroDivisionError):  # the class does not accept null here
            continue
        compared += 1
        if read({"model_type": model_type, **given}) != read(whole):
            different.append(field)
    assert compared > 2
    assert not different
