"""Read config.json: every family, both spellings of RoPE fields, and every config that must be refused by name."""

from __future__ import annotations

import ast
import inspect
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import ridgeline.archs
from ridgeline.archs import FAMILIES, family_of, quantization_of, spec_from_config
from ridgeline.archs.config import HARMLESS
from ridgeline.archs.quantization import Fp8Blocks
from ridgeline.errors import ConfigError
from ridgeline.spec import (
    MLP,
    Attention,
    DeepNormLayer,
    DynamicNTKScaling,
    ExpertGroups,
    GatedMLP,
    LatentAttention,
    Layer,
    LayerNorm,
    LightningAttention,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    ModelSpec,
    MoE,
    ParallelLayer,
    RMSNorm,
    Rope,
    YarnScaling,
    to_json,
)

SIZES: dict[str, Any] = {
    "vocab_size": 32, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "max_position_embeddings": 128,
}  # fmt: skip
GPT2: dict[str, Any] = {"vocab_size": 32, "n_embd": 64, "n_head": 4, "n_layer": 4, "n_positions": 128}
EXPERTS = {"num_experts_per_tok": 2}
RECURRENT: dict[str, Any] = {"vocab_size": 32, "hidden_size": 64, "num_hidden_layers": 4}
HEADS = {"num_key_value_heads": 4, "head_dim": 16}
KV_HEADS = {"num_key_value_heads": 4}
# Fields that a family requires.
REQUIRED: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "smollm3", "granite", "phi3"), SIZES),
    **dict.fromkeys(("gemma2", "gemma3_text", "olmo2", "olmo3", "glm", "glm4", "gpt_neox"), SIZES),
    **dict.fromkeys(("gemma", "arcee", "seed_oss", "helium", "ernie4_5", "starcoder2", "exaone4"), SIZES),
    **dict.fromkeys(("qwen2_moe", "olmoe", "glm4_moe", "minimax_m2"), SIZES),
    **dict.fromkeys(("ministral", "cwm", "exaone", "internlm3", "iquestcoder", "jais2", "hyperclovax"), SIZES),
    **dict.fromkeys(("vaultgemma", "sarvam_moe", "sarvam_mla", "glm4_moe_lite", "youtu"), SIZES),
    "solar_open": {name: size for name, size in SIZES.items() if name != "intermediate_size"},
    **dict.fromkeys(("flex_olmo", "exaone_moe", "afmoe", "ernie4_5_moe"), SIZES),
    **dict.fromkeys(("granite_swa", "granitemoe_swa", "mellum", "flint", "hy_v3", "minicpm3", "biogpt"), SIZES),
    **dict.fromkeys(("hunyuan_v1_dense", "hunyuan_v1_moe", "ministral3"), SIZES),
    "mistral3": {"text_config": SIZES | HEADS},
    **dict.fromkeys(("apertus", "olmo", "nanochat", "nemotron", "axk1", "phimoe", "cohere2_moe"), SIZES),
    "kolibri1": {name: size for name, size in SIZES.items() if name != "intermediate_size"},
    "gpt_neox_japanese": {name: size for name, size in SIZES.items() if name != "intermediate_size"},
    "dots1": SIZES | EXPERTS | {"n_routed_experts": 4, "n_shared_experts": 1},
    **dict.fromkeys(("gpt2", "gpt-sw3"), GPT2),
    **dict.fromkeys(("gptj", "codegen", "gpt_bigcode"), GPT2),
    **dict.fromkeys(("cohere", "cohere2", "phi", "stablelm"), SIZES),
    "falcon": {name: size for name, size in SIZES.items() if name != "intermediate_size"},
    "persimmon": SIZES,
    "bloom": {"vocab_size": 32, "hidden_size": 64, "n_head": 4, "n_layer": 4},
    "mpt": {"vocab_size": 32, "d_model": 64, "n_heads": 4, "n_layers": 4, "max_seq_len": 128},
    "opt": {name: size for name, size in SIZES.items() if name != "intermediate_size"} | {"ffn_dim": 48},
    "xglm": {
        "vocab_size": 32,
        "d_model": 64,
        "ffn_dim": 48,
        "num_layers": 4,
        "attention_heads": 4,
        "max_position_embeddings": 128,
    },
    "gpt_neo": {"vocab_size": 32, "hidden_size": 64, "num_layers": 24, "num_heads": 4, "max_position_embeddings": 128},
    "lfm2": {name: SIZES[name] for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")},
    "jamba": {name: size for name, size in SIZES.items() if name != "max_position_embeddings"},
    "lfm2_moe": {
        **{n: SIZES[n] for n in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")},
        "layer_types": ["conv", "full_attention"] * 2,
    },
    "bamba": {name: size for name, size in SIZES.items() if name != "max_position_embeddings"},
    "recurrent_gemma": {name: size for name, size in SIZES.items() if name != "max_position_embeddings"},
    "falcon_h1": SIZES,
    **dict.fromkeys(("granitemoe", "granitemoeshared", "granitemoehybrid"), SIZES),
    "nemotron_h": {"vocab_size": 32, "hidden_size": 64, "layers_block_type": ["mamba", "mlp", "attention", "moe"]},
    **dict.fromkeys(("mamba", "falcon_mamba", "mamba2"), RECURRENT),
    "mixtral": SIZES | EXPERTS | {"num_local_experts": 4},
    "qwen3_moe": SIZES | EXPERTS | {"num_experts": 4, "moe_intermediate_size": 8},
    "gpt_oss": SIZES,
    "minimax": SIZES,
    **dict.fromkeys(("minimax_text_01", "minimax_m1"), SIZES | {"attn_type_list": [0, 0, 0, 1]}),
    "deepseek_v2": SIZES | EXPERTS,
    "deepseek_v3": SIZES,
    **dict.fromkeys(("deepseek_v32", "glm_moe_dsa", "olmo_hybrid", "lfm3", "laguna", "apertus1p5_text", "beam"), SIZES),
    "modernbert-decoder": SIZES,
    "dbrx": {"vocab_size": 32, "d_model": 64, "n_heads": 4, "n_layers": 4, "max_seq_len": 128},
    "longcat_flash": {
        "vocab_size": 32,
        "hidden_size": 64,
        "num_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 128,
    },
    "qwen3_next": SIZES,
    "qwen3_5_text": SIZES,
    "qwen3_5_moe_text": {name: size for name, size in SIZES.items() if name != "intermediate_size"},
    "qwen3_5": {"text_config": SIZES | KV_HEADS},
    "qwen3_5_moe": {"text_config": SIZES | KV_HEADS},
    **dict.fromkeys(("gemma4_text", "gemma4_unified_text", "llama4_text"), SIZES),
    "cohere_compass_text": SIZES | {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 5e4}}},
    "lara_mini": {name: size for name, size in SIZES.items() if name != "intermediate_size"},
    "diffusion_gemma": {
        "text_config": SIZES
        | {"max_position_embeddings": 512, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 8}
    },
    **{key: {"text_config": SIZES | HEADS} for key in ("gemma4", "gemma4_unified", "llama4")},
    "gemma3": {"text_config": {n: SIZES[n] for n in ("hidden_size", "intermediate_size", "num_hidden_layers")} | HEADS},
    "sdar": SIZES | {"block_size": 4, "mask_token_id": 3},
    "llada2_moe": SIZES | {"moe_intermediate_size": 8},
    "llada": {
        "d_model": 32,
        "n_layers": 2,
        "n_heads": 4,
        "mlp_hidden_size": 64,
        "vocab_size": 64,
        "max_sequence_length": 128,
        "mask_token_id": 3,
    },
    "Dream": SIZES,
    "kimi_linear": {name: size for name, size in SIZES.items() if name != "max_position_embeddings"},
}
# Further fields of a small config; without them the fields have the sizes of the family's published model.
BAMBA = {"mamba_n_heads": 4}
EXPLICIT: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("gemma2", "gemma3_text", "gemma4_text", "glm", "glm4", "qwen3", "sdar"), HEADS),
    **dict.fromkeys(("gemma4_unified_text", "llama4_text", "lara_mini", "lfm3", "laguna", "beam"), HEADS),
    **dict.fromkeys(("gemma", "seed_oss", "helium", "ernie4_5", "minimax_m2"), HEADS),
    **dict.fromkeys(("starcoder2", "exaone4", "qwen2_moe", "glm4_moe", "dots1"), KV_HEADS),
    **dict.fromkeys(("cwm", "internlm3", "iquestcoder", "vaultgemma", "solar_open", "sarvam_moe"), HEADS),
    **dict.fromkeys(("ministral", "exaone", "exaone_moe", "ernie4_5_moe"), KV_HEADS),
    "llada2_moe": KV_HEADS | {"mask_token_id": 3},
    "diffusion_gemma": {"canvas_length": 8},
    "Dream": KV_HEADS | {"mask_token_id": 3},
    "stablelm": KV_HEADS,
    "granite_swa": KV_HEADS,
    **dict.fromkeys(("mellum", "flint", "hy_v3", "ministral3", "kolibri1"), HEADS),
    "phimoe": KV_HEADS,
    "longcat_flash": {"ffn_hidden_size": 48},
    "gptj": {"rotary_dim": 8},
    "codegen": {"rotary_dim": 8},
    "gpt_oss": HEADS | EXPERTS | {"num_local_experts": 4},
    "lfm2": {"num_key_value_heads": 4},
    "jamba": {"num_key_value_heads": 4, "num_experts": 4},
    "lfm2_moe": {"num_key_value_heads": 4},
    "bamba": BAMBA | {"num_key_value_heads": 4},
    "granitemoehybrid": BAMBA,
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 4, "num_key_value_heads": 4},
    "mamba2": {"num_heads": 4, "head_dim": 32, "state_size": 8, "n_groups": 2},
    **dict.fromkeys(("minimax", "minimax_text_01", "minimax_m1"), KV_HEADS),
    **dict.fromkeys(("mistral", "qwen2", "smollm3", "mixtral", "qwen3_moe", "qwen3_next"), KV_HEADS),
}
EVERY = pytest.mark.parametrize("family", FAMILIES)


def read(family: str, **fields: Any) -> ModelSpec:
    return spec_from_config({"model_type": family, **REQUIRED[family], **EXPLICIT.get(family, {}), **fields})


def refusal(family: str, **fields: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        read(family, **fields)
    assert "\n" not in str(caught.value)
    return str(caught.value)


class Watched(dict[str, Any]):
    """A config that records which of its fields were read."""

    def __init__(self, fields: dict[str, Any]) -> None:
        super().__init__(fields)
        self.asked: set[str] = set()

    def get(self, name: str, default: Any = None) -> Any:
        self.asked.add(name)
        return super().get(name, default)


def fields_of(family: str, **fields: Any) -> set[str]:
    """Return every field that the family reads, whether it exists or not."""
    config = Watched({"model_type": family, **REQUIRED[family], **EXPLICIT.get(family, {}), **fields})
    spec_from_config(config)
    return config.asked - {"model_type", "quantization_config"}


# ---- which families, and how a file is refused --------------------------------------------------------------


def test_the_configs_here_cover_every_family() -> None:
    assert set(REQUIRED) == set(FAMILIES)


@pytest.mark.parametrize("model_type", ["bart", None, 3, ["llama"], "Llama", ""])
def test_an_unknown_architecture_is_answered_with_similar_ones(model_type: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        spec_from_config({**SIZES, "model_type": model_type})
    message = str(caught.value)
    assert ("a missing model_type" if model_type is None else repr(model_type)) in message
    assert "docs/models.md" in message and len(message) < 200
    assert ("similar: llama, " in message) == (model_type == "Llama")
    with pytest.raises(ConfigError, match="a missing model_type is not a supported architecture"):
        spec_from_config(SIZES)


@EVERY
def test_required_fields(family: str) -> None:
    assert read(family).family == family
    for name in REQUIRED[family]:
        config = EXPLICIT.get(family, {}) | {k: v for k, v in REQUIRED[family].items() if k != name}
        with pytest.raises(ConfigError, match=rf"^config\.json: num_local_experts is missing|\b{name} is missing$"):
            spec_from_config({"model_type": family, **config})


@EVERY
def test_an_unread_field_is_an_error_that_names_it(family: str) -> None:
    message = refusal(family, made_up=1, also_unknown=None)
    assert message.startswith("config.json: also_unknown, made_up: not understood for model_type " + repr(family))


def test_an_unread_field_of_the_rotation_is_named_with_its_path() -> None:
    for where in ("rope_parameters", "rope_scaling"):
        rope = {"rope_type": "linear", "factor": 2.0, "beta": 1}
        assert refusal("llama", **{where: rope}).startswith(f"config.json: {where}.beta: not understood")
    nested = {"full_attention": {"rope_type": "default", "x": 1}, "sliding_attention": {"rope_type": "default"}}
    message = refusal("gemma3_text", rope_parameters=nested)
    assert message.startswith("config.json: rope_parameters.full_attention.x: not understood")
    del nested["full_attention"]["x"]
    message = refusal("olmo3", rope_parameters=nested | {"linear_attention": {}})
    assert message.startswith("config.json: rope_parameters.linear_attention: not understood")


@EVERY
def test_harmless_fields_are_harmless(family: str) -> None:
    harmless = HARMLESS | set(FAMILIES[family].harmless)
    extra = dict.fromkeys(harmless - {"model_type"} - fields_of(family), "anything")
    assert len(extra) > 50
    assert read(family, **extra) == read(family)


@EVERY
def test_a_field_is_not_both_read_and_harmless(family: str) -> None:
    """If it were both, a later change that stops reading it would go unnoticed."""
    checked = {"pad_token_id"} if family == "xglm" else set()  # its row of a table is zero
    assert not (fields_of(family) - checked) & (HARMLESS | set(FAMILIES[family].harmless))


KINDS = {"bool": False, "number": 2, "text": "x", "list": [1], "object": {"x": 1}}
# These fields are not read if the flag beside them is off.
UNUSED = {("qwen3_moe", "sliding_window"), ("qwen3_moe", "num_local_experts")}


@EVERY
def test_wrong_types_are_named(family: str) -> None:
    """A field accepts one of the five kinds of JSON values, and its error for the four others names it."""
    for name in fields_of(family):
        if (family, name) in UNUSED:
            continue
        taken = []
        for kind, value in KINDS.items():
            try:
                read(family, **{name: value})
                taken.append(kind)
            except ConfigError as e:
                if name not in str(e):
                    taken.append(kind)
        assert len(taken) <= 1, f"{name}: {taken}"


HUGE = 10**400  # larger than any float
HOSTILE: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 3, 2.5, 0.0, -2.0, 1e-300, math.nan, math.inf, HUGE, "", "x", [], [[]], [None],
    [-1], [1, 2, 3, 4], ["full_attention"] * 4, {}, {"rope_type": "linear"}, {"rope_type": "linear", "factor": 0},
    {"rope_type": []},
)  # fmt: skip


@EVERY
def test_no_value_ends_in_another_error(family: str) -> None:
    """Any value in a file gives either a spec or a ConfigError."""
    broken = []
    for name in sorted(fields_of(family) | {"quantization_config"}):
        for value in HOSTILE:
            try:
                read(family, **{name: value})
            except ConfigError:
                pass
            except Exception as e:
                broken.append(f"{name}={str(value)[:20]}: {e!r}")
    assert not broken, "\n".join(broken)


@pytest.mark.parametrize("kind", ["linear", "dynamic", "llama3", "yarn", "longrope"])
def test_no_value_of_the_rotation_ends_in_another_error(kind: str) -> None:
    broken = []
    for name in (*SCALED[kind][1], "rope_theta", "original_max_position_embeddings", "factor", "attention_factor"):
        for value in HOSTILE:
            try:
                read("phi3", rope_scaling={"rope_type": kind, **SCALED[kind][1], name: value})
            except ConfigError:
                pass
            except Exception as e:
                broken.append(f"{name}={str(value)[:20]}: {e!r}")
    assert not broken, "\n".join(broken)


def test_quantized_weights_are_refused_by_name() -> None:
    for method in ("aqlm", "quip", "hqq", "exl3"):
        message = refusal("llama", quantization_config={"quant_method": method, "bits": 4})
        assert f"quant_method '{method}' is not supported" in message
    assert "'unnamed'" in refusal("llama", quantization_config={"bits": 4})
    assert read("llama", quantization_config=None) == read("llama")


# The field as in DeepSeek-V3's config and in later ones of the same kind.
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 64]}


def test_fp8_in_blocks_is_read() -> None:
    more = {"scale_fmt": "ue8m0", "modules_to_not_convert": ["lm_head"]}
    for family in ("deepseek_v3", "llama"):
        assert read(family, quantization_config=FP8) == read(family)
        for config in (FP8, FP8 | more):
            found = quantization_of({"model_type": family, "quantization_config": config})
            assert isinstance(found, Fp8Blocks) and found.blocks == (128, 64)
        assert quantization_of({"model_type": family}) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight_block_size": [128]}, "weight_block_size is [128]; it must be two positive numbers"),
        ({"weight_block_size": [128, 0]}, "it must be two positive numbers"),
        ({"weight_block_size": [128, True]}, "it must be two positive numbers"),
        ({"weight_block_size": 128}, "weight_block_size is 128, not list"),
        ({"fmt": "e5m2"}, "quantization_config.fmt is 'e5m2', which is not supported"),
        ({"activation_scheme": "static"}, "quantization_config.activation_scheme is 'static'"),
        ({"group_size": 128}, "quantization_config.group_size: not understood"),
        ({"weight_block_size": None, "activation_scheme": "x"}, "activation_scheme is 'x'"),
    ],
)
def test_other_fp8_is_refused(change: dict[str, Any], message: str) -> None:
    assert message in refusal("deepseek_v3", quantization_config=FP8 | change)


# ---- the rotation, in two spellings -------------------------------------------------------------------------

_LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_LONG = {"short_factor": [1.0] * 7 + [2], "long_factor": [3.0] * 8, "original_max_position_embeddings": 64}
_YARN = {"factor": 4.0, "original_max_position_embeddings": 64}
# Kind -> expected scaling, its fields in the file, and the longest context that it allows.
SCALED: dict[str, tuple[Any, dict[str, Any], int]] = {
    "default": (None, {}, 128),
    "linear": (LinearScaling(4.0), {"factor": 4}, 512),
    "dynamic": (DynamicNTKScaling(4.0, 128), {"factor": 4.0}, 512),
    "llama3": (Llama3Scaling(8.0, 1.0, 4.0, 64), _LLAMA3, 128),
    "yarn": (YarnScaling(4.0, 64, 0.1 * math.log(4) + 1), _YARN, 256),
    "longrope": (
        LongRopeScaling((1.0,) * 7 + (2.0,), (3.0,) * 8, 64, math.sqrt(1 + math.log(2) / math.log(64))), _LONG, 128,
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", SCALED)
@pytest.mark.parametrize("word", ["rope_type", "type"])
def test_both_spellings_give_equal_specs(word: str, kind: str) -> None:
    scaling, fields, context = SCALED[kind]
    new = read("llama", rope_parameters={"rope_type": kind, "rope_theta": 700.0, **fields})
    old = read("llama", rope_theta=700.0, rope_scaling={word: kind, **fields})
    assert new == old
    assert new.ropes() == (Rope(16, 700.0, scaling=scaling),)
    assert new.max_position_embeddings == context


@pytest.mark.parametrize(
    ("family", "old", "new", "dim"),
    [
        ("phi3", {"partial_rotary_factor": 0.75}, {"partial_rotary_factor": 0.75}, 12),
        ("glm", {"partial_rotary_factor": 0.25}, {"partial_rotary_factor": 0.25}, 4),
        ("glm4", {}, {}, 8),
        ("gpt_neox", {"rotary_pct": 0.5}, {"partial_rotary_factor": 0.5}, 8),
        ("gpt_neox", {}, {}, 4),
    ],
)
def test_both_spellings_of_partial_rotation(family: str, old: dict[str, Any], new: dict[str, Any], dim: int) -> None:
    theta = "rotary_emb_base" if family == "gpt_neox" else "rope_theta"
    spec = read(family, **{theta: 700.0}, **old)
    assert spec == read(family, rope_parameters={"rope_type": "default", "rope_theta": 700.0, **new})
    assert spec.ropes() == (Rope(dim, 700.0, interleaved=family.startswith("glm")),)


def test_both_spellings_of_rotations_by_kind() -> None:
    full = {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e4}
    both = {"full_attention": full, "sliding_attention": {"rope_type": "default", "rope_theta": 700.0}}
    new = read("gemma3_text", num_hidden_layers=7, rope_parameters=both)
    scaling = {"rope_type": "linear", "factor": 8.0}
    old = read("gemma3_text", num_hidden_layers=7, rope_theta=5e4, rope_local_base_freq=700.0, rope_scaling=scaling)
    assert new == old
    local, wide = Rope(16, 700.0), Rope(16, 5e4, scaling=LinearScaling(8.0))
    assert [layer.mixer.rope for layer in new.layers] == [local] * 5 + [wide, local]
    assert new.max_position_embeddings == 128  # the config's own number is already the scaled one
    yarn = {"rope_type": "yarn", **_YARN}
    both = {"full_attention": yarn | {"rope_theta": 5e5}, "sliding_attention": {"rope_theta": 5e5}}
    assert read("olmo3", rope_parameters=both) == read("olmo3", rope_theta=5e5, rope_scaling=yarn)


def test_yarn_temperature() -> None:
    def factor(**fields: Any) -> float:
        scaling = read("llama", rope_scaling={"rope_type": "yarn", **_YARN, **fields}).ropes()[0].scaling
        assert isinstance(scaling, YarnScaling)
        return scaling.attention_factor

    def temperature(m: float) -> float:
        return 0.1 * m * math.log(4) + 1

    assert factor(mscale=1.4, mscale_all_dim=0.6) == pytest.approx(temperature(1.4) / temperature(0.6))
    assert factor(mscale=1.4) == factor(mscale_all_dim=0.6) == pytest.approx(temperature(1.0))
    assert factor(attention_factor=1.25, mscale=1.4, mscale_all_dim=0.6) == 1.25
    assert factor(factor=0.5) == 1.0


def test_original_length_at_the_top_level_has_priority() -> None:
    """Phi-3 keeps it there; the factor then follows from the two lengths."""
    scaling = {"type": "su", "short_factor": [1] * 8, "long_factor": [2] * 8}
    spec = read("phi3", original_max_position_embeddings=32, rope_scaling=scaling)
    wanted = math.sqrt(1 + math.log(128 / 32) / math.log(32))
    assert spec.ropes()[0].scaling == LongRopeScaling((1.0,) * 8, (2.0,) * 8, 32, wanted)
    both = scaling | {"original_max_position_embeddings": 64}
    assert read("phi3", original_max_position_embeddings=32, rope_scaling=both) == spec


def windows_of(family: str, **fields: Any) -> list[int | None]:
    return [layer.mixer.window for layer in read(family, **fields).layers]


def test_a_null_window_is_no_window() -> None:
    """An absent window, however, is the default of the class."""
    on = {"use_sliding_window": True}
    for family in ("qwen2", "qwen3"):
        assert windows_of(family, **on, sliding_window=None, max_window_layers=0) == [None] * 4
        assert windows_of(family, **on, max_window_layers=0) == [4096] * 4
    assert windows_of("qwen3_moe", **on, sliding_window=None) == [None] * 4
    assert windows_of("qwen3_moe", **on) == [4096] * 4
    for family in ("gemma2", "gemma3_text", "olmo3", "gpt_oss"):
        assert "sliding_window is null" in refusal(family, sliding_window=None)
        kinds = ["full_attention"] * 4
        assert windows_of(family, sliding_window=None, layer_types=kinds) == [None] * 4
    assert "sliding_window is null" in refusal(
        "qwen2", **on, sliding_window=None, layer_types=["sliding_attention"] * 4
    )


@pytest.mark.parametrize("value", [0, 0.0, -1.0])
@pytest.mark.parametrize("name", ["factor", "low_freq_factor", "high_freq_factor"])
def test_llama3_refuses_fields_that_are_not_positive(name: str, value: float) -> None:
    rope = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, name: value}
    assert f"rope_parameters.{name} is {float(value)}; it must be positive" in refusal("llama", rope_parameters=rope)


def test_dynamic_ntk_needs_two_pairs() -> None:
    """The exponent of its base is dim / (dim - 2)."""
    rope = {"rope_type": "dynamic", "factor": 2.0}
    assert read("llama", head_dim=4, rope_parameters=rope).ropes()[0].dim == 4
    assert "head_dim is 2, of which 2 numbers are rotated" in refusal("llama", head_dim=2, rope_parameters=rope)


def test_zeros_of_a_rotation() -> None:
    """A zero for yarn's numbers of rotations is their default; a zero length or factor is an error."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    plain = read("llama", rope_parameters=yarn)
    for name in ("beta_fast", "beta_slow"):
        assert read("llama", rope_parameters={**yarn, name: 0}) == plain
        assert f"{name} is -1.0" in refusal("llama", rope_parameters={**yarn, name: -1.0})
    for name in ("factor", "original_max_position_embeddings"):
        assert f"rope_parameters.{name} is 0" in refusal("llama", rope_parameters={**yarn, name: 0})
    assert "final_logit_softcapping is 0.0" in refusal("gemma2", final_logit_softcapping=0.0)
    assert "rms_norm_eps is -1.0; it must not be negative" in refusal("llama", rms_norm_eps=-1.0)


def test_a_part_of_a_head() -> None:
    """Families that rotate whole heads ignore the field unless there is a scaling; an odd size is rotated like the next
    even one.
    """
    for family in ("qwen3_moe", "granitemoeshared", "llama"):
        assert read(family, partial_rotary_factor=0.5).ropes() == read(family).ropes()
        linear = {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}
        assert "rotates whole heads" in refusal(family, rope_parameters=linear)
    assert read("gpt_neox", rotary_pct=0.3).ropes() == (Rope(4, 1e4),)
    assert read("gpt_neox", rotary_pct=0.45).ropes() == (Rope(8, 1e4, odd=True),)


def test_the_rotations_of_olmo_3_are_those_of_its_kinds_of_layers() -> None:
    """A rotation at the top level has no effect; a yarn's own length counts, and `truncate` beside the kinds counts."""
    flat = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 3000.0}
    assert read("olmo3", rope_parameters=flat) == read("olmo3")
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "truncate": False}
    spec = read("olmo3", rope_parameters={"full_attention": yarn}, original_max_position_embeddings=32)
    scaling = spec.layers[3].mixer.rope.scaling
    assert (scaling.original_max_position_embeddings, scaling.truncate) == (64, True)
    spec = read("olmo3", rope_parameters={"full_attention": yarn, "truncate": False})
    assert not spec.layers[3].mixer.rope.scaling.truncate


def test_errors_of_nested_parts_name_the_model() -> None:
    message = refusal("llama", rope_parameters={"rope_type": "default", "beta": 1})
    assert "not understood for model_type 'llama'" in message


def test_rotations_that_are_refused() -> None:
    both = {"rope_parameters": {"rope_type": "default"}, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}
    assert read("llama", **both) == read("llama", rope_scaling=both["rope_scaling"])  # rope_scaling has priority
    message = refusal("llama", rope_scaling={"type": "mrope"})
    assert "rope_scaling.rope_type is 'mrope'; supported: default, dynamic, linear, llama3" in message
    assert "rope_scaling.factor is missing" in refusal("llama", rope_scaling={"type": "linear"})
    assert "short_factor must be a list of positive numbers" in refusal(
        "llama", rope_scaling={"type": "longrope", **_LONG, "short_factor": [True] * 8}
    )
    assert "long_factor must have 8 entries, not 3" in refusal(
        "llama", rope_scaling={"type": "longrope", **_LONG, "long_factor": [1.0] * 3}
    )
    assert "rope_interleaved is True, which is not supported" in refusal("llama", rope_interleaved=True)


# ---- the spec of each family --------------------------------------------------------------------------------


def windows(spec: ModelSpec) -> list[int | None]:
    return [layer.mixer.window for layer in spec.layers]


def test_windows() -> None:
    assert windows(read("llama")) == [None] * 4
    assert windows(read("mistral")) == [4096] * 4
    assert windows(read("mistral", sliding_window=None)) == [None] * 4
    assert windows(read("mixtral", sliding_window=9)) == [9] * 4
    assert windows(read("phi3", sliding_window=9)) == [9] * 4
    assert windows(read("gemma2", sliding_window=9)) == [9, None, 9, None]
    assert windows(read("gemma3_text", sliding_window=9, sliding_window_pattern=3)) == [9, 9, None, 9]
    assert windows(read("olmo3", sliding_window=9)) == [9, 9, 9, None]
    assert windows(read("qwen3_moe", sliding_window=9)) == [None] * 4
    assert windows(read("qwen3_moe", sliding_window=9, use_sliding_window=True)) == [9] * 4
    for family in ("qwen2", "qwen3"):
        local = {"sliding_window": 9, "max_window_layers": 3}
        assert windows(read(family, **local)) == [None] * 4
        assert windows(read(family, **local, use_sliding_window=True)) == [None, None, None, 9]
    kinds = ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]
    assert windows(read("gemma2", sliding_window=9, layer_types=kinds)) == [None, 9, 9, None]
    assert "layer_types must hold 4 entries" in refusal("gemma2", layer_types=kinds[:3])
    assert "layer_types must hold 4 entries" in refusal("gemma2", layer_types=[*kinds[:3], "chunked_attention"])


def test_layers_without_rotation() -> None:
    rotated = [layer.mixer.rope is not None for layer in read("smollm3").layers]
    assert rotated == [True, True, True, False]
    spec = read("smollm3", no_rope_layers=[0, 1, 1, 0, 1], sliding_window=9, use_sliding_window=True)
    assert [layer.mixer.rope is not None for layer in spec.layers] == [False, True, True, False]
    assert windows(spec) == [9, None, None, 9]
    assert "no_rope_layers must hold 4 entries" in refusal("smollm3", no_rope_layers=[1, 1])


def test_multipliers() -> None:
    spec = read(
        "granite", embedding_multiplier=12.0, logits_scaling=8.0, residual_multiplier=0.2, attention_multiplier=0.5
    )
    layer = spec.layers[0]
    assert isinstance(layer, Layer)
    assert (spec.embedding_scale, spec.logit_scale, layer.residual_scale, layer.mixer.scale) == (12, 0.125, 0.2, 0.5)
    spec = read("gemma2", query_pre_attn_scalar=64, attn_logit_softcapping=50.0, final_logit_softcapping=30.0)
    mixer = spec.layers[0].mixer
    assert (spec.embedding_scale, spec.logit_softcap, mixer.scale, mixer.softcap) == (8.0, 30.0, 0.125, 50.0)
    depth = read("gpt2", scale_attn_by_inverse_layer_idx=True)
    assert [layer.mixer.scale for layer in depth.layers] == [0.25, 0.125, 0.25 / 3, 0.0625]
    assert read("gpt2", scale_attn_weights=False).layers[0].mixer.scale == 1.0


def test_experts() -> None:
    assert read("mixtral").layers[0].mlp == MoE(4, 2, 48)
    assert read("qwen3_moe", norm_topk_prob=True).layers[0].mlp == MoE(4, 2, 8)
    spec = read("qwen3_moe", num_hidden_layers=6, decoder_sparse_step=2, mlp_only_layers=[3])
    moe, dense = MoE(4, 2, 8, normalize=False), GatedMLP(48)
    assert [layer.mlp for layer in spec.layers] == [dense, moe, dense, dense, dense, moe]
    renamed = (
        {k: v for k, v in REQUIRED["qwen3_moe"].items() if k != "num_experts"} | KV_HEADS | {"num_local_experts": 4}
    )
    assert spec_from_config({"model_type": "qwen3_moe", **renamed}) == read("qwen3_moe")


def test_experts_of_deepseek() -> None:
    v2 = read("deepseek_v2", n_shared_experts=3, moe_intermediate_size=10, n_routed_experts=8)
    shared = GatedMLP(30)
    assert v2.layers[0].mlp == MoE(8, 2, 10, normalize=False, shared=shared)
    limited = {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "routed_scaling_factor": 16.0}
    moe = read("deepseek_v2", n_routed_experts=8, **limited).layers[0].mlp
    assert isinstance(moe, MoE) and moe.shared == GatedMLP(2 * 1407)
    assert (moe.groups, moe.scale) == (ExpertGroups(4, 2, "best"), 16.0)
    v3 = read("deepseek_v3", first_k_dense_replace=1).layers[1].mlp
    assert v3 == MoE(
        256, 8, 2048, normalize=True, scores="sigmoid", choice_bias=True, groups=ExpertGroups(8, 4, "best_two"),
        scale=2.5, shared=GatedMLP(2048),
    )  # fmt: skip

    def kinds(family: str, **fields: Any) -> list[bool]:
        return [isinstance(layer.mlp, MoE) for layer in read(family, **fields).layers]

    assert kinds("deepseek_v3") == [False, False, False, True]
    assert kinds("deepseek_v2") == [True] * 4
    assert kinds("deepseek_v2", first_k_dense_replace=1, moe_layer_freq=1) == [False, True, True, True]
    assert "moe_layer_freq is 2, which is not supported" in refusal("deepseek_v3", moe_layer_freq=2)
    assert read("deepseek_v2", n_shared_experts=0).layers[0].mlp == replace(v2_default(), shared=None)
    assert "n_routed_experts is null" in refusal("deepseek_v3", n_routed_experts=None)
    one = read("deepseek_v3", n_group=1, topk_group=1, first_k_dense_replace=0).layers[0].mlp
    assert isinstance(one, MoE) and one.groups is None


def v2_default() -> MoE:
    moe = read("deepseek_v2").layers[0].mlp
    assert isinstance(moe, MoE)
    return moe


def test_the_fields_that_deepseek_refuses() -> None:
    assert "topk_method is 'noaux_tc'; supported: greedy" in refusal("deepseek_v2", topk_method="noaux_tc")
    assert "n_group is missing" in refusal("deepseek_v2", topk_method="group_limited_greedy", topk_group=1)
    assert "topk_group is missing" in refusal("deepseek_v2", topk_method="group_limited_greedy", n_group=8)
    assert "norm_topk_prob is True" in refusal("deepseek_v2", norm_topk_prob=True)
    assert "scoring_func is 'sigmoid'" in refusal("deepseek_v2", scoring_func="sigmoid")
    assert "scoring_func is 'softmax'" in refusal("deepseek_v3", scoring_func="softmax")
    assert "n_routed_experts 256 is not a multiple of n_group 7" in refusal("deepseek_v3", n_group=7)
    assert "num_experts_per_tok 40 is more than the 32 experts" in refusal(
        "deepseek_v3", num_experts_per_tok=40, topk_group=1
    )
    assert "rotated in pairs, so it must be even" in refusal("deepseek_v3", qk_rope_head_dim=7)


def test_minimax() -> None:
    """Slopes fall from layer to layer; the published config and transformers' config give the same spec."""
    kinds = ["linear_attention", "linear_attention", "linear_attention", "full_attention"]
    alphas = {"full_attn": 2.0, "linear_attn": 3.0, "mlp": 4.0}
    old_names = {"full_attn": "full_attention", "linear_attn": "linear_attention", "mlp": "mlp"}
    new = read(
        "minimax", layer_types=kinds, rotary_dim=8,
        **{f"{part}_alpha_factor": a for part, a in alphas.items()}, mlp_beta_factor=0.5,
    )  # fmt: skip
    old: dict[str, Any] = {f"layernorm_{old_names[part]}_alpha": a for part, a in alphas.items()}
    old |= {"layernorm_mlp_beta": 0.5, "rotary_dim": 8, "postnorm": True, "shared_intermediate_size": [0]}
    for family in ("minimax_text_01", "minimax_m1"):
        assert replace(read(family, **old), family="minimax") == new
    first, *_, last = new.layers
    assert isinstance(first, DeepNormLayer) and isinstance(first.mixer, LightningAttention)
    assert isinstance(last, DeepNormLayer) and last.mixer.rope == Rope(8, 1e6)
    assert (first.mixer_alpha, last.mixer_alpha, first.mlp_alpha, first.mlp_beta) == (3.0, 2.0, 4.0, 0.5)
    assert first.mixer.slopes == pytest.approx([(1 + 1e-5) * 2 ** (-2 * (i + 1)) for i in range(4)])
    assert new.layers[2].mixer.slope_scale == pytest.approx(1 / 3, rel=1e-4)
    assert read("minimax").layers[0].mixer.rope and not read("minimax").layers[1].mixer.rope
    assert "layer_types must hold 4 entries" in refusal("minimax", layer_types=kinds[:3])
    assert "attn_type_list must hold 4 entries" in refusal("minimax_m1", attn_type_list=[0, 0, 0, 2])
    assert "shared_intermediate_size is not 0" in refusal("minimax_text_01", shared_intermediate_size=[64])
    assert "postnorm is False" in refusal("minimax_text_01", postnorm=False)
    assert "rotary_dim is 18, more than the head size 16" in refusal("minimax_text_01", rotary_dim=18)


def test_latent_attention() -> None:
    yarn = {"type": "yarn", "factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707, **_YARN_LENGTH}
    mixer = read("deepseek_v2", q_lora_rank=None, rope_scaling=yarn).layers[0].mixer
    assert isinstance(mixer, LatentAttention)
    # sqrt(d) of the whole key, times yarn's temperature for the scores: it applies to queries and to keys, hence
    # squared.
    assert mixer.scale == pytest.approx((0.1 * 0.707 * math.log(40) + 1) ** 2 / math.sqrt(192))
    assert mixer.rope == Rope(64, interleaved=True, scaling=YarnScaling(40.0, 64, 1.0))
    assert (mixer.q_lora_rank, mixer.latent_norm) == (None, RMSNorm(1e-6))
    assert read("deepseek_v2").layers[0].mixer == replace(mixer, q_lora_rank=1536, scale=192**-0.5, rope=INTERLEAVED)
    new = {"rope_type": "yarn", "rope_theta": 1e4, **{k: v for k, v in yarn.items() if k != "type"}}
    assert read("deepseek_v2", q_lora_rank=None, rope_parameters=new).layers[0].mixer == mixer
    assert read("deepseek_v3").ropes() == (INTERLEAVED,)
    assert read("deepseek_v3", rope_interleave=False).ropes() == read("deepseek_v3", rope_interleave=None).ropes()
    assert read("deepseek_v3", rope_interleave=False).ropes() == (Rope(64),)
    biased = read("deepseek_v3", attention_bias=True).layers[0].mixer
    assert isinstance(biased, LatentAttention) and biased.latent_bias and biased.out_bias


_YARN_LENGTH = {"original_max_position_embeddings": 64}
INTERLEAVED = Rope(64, interleaved=True)


def test_shapes_of_layers() -> None:
    pre_and_post = {
        "olmo2": (None, RMSNorm(1e-5)),
        "glm4": (RMSNorm(1.5625e-7),) * 2,
        "glm": (RMSNorm(1.5625e-7), None),
    }
    for family, norms in pre_and_post.items():
        layer = read(family).layers[0]
        assert isinstance(layer, Layer) and (layer.pre_norm, layer.post_norm) == norms
    assert read("gemma2").norm == RMSNorm(1e-6, offset=1.0)
    neox = read("gpt_neox").layers[0]
    assert neox == ParallelLayer(neox.mixer, MLP(48, "gelu", bias=True), LayerNorm(1e-5))
    assert isinstance(read("gpt_neox", use_parallel_residual=False).layers[0], Layer)
    assert read("gpt2").layers[0].mlp == MLP(256, "gelu_tanh", bias=True)
    assert read("gpt2").num_position_embeddings == 128
    assert "n_ctx is 64" in refusal("gpt2", n_ctx=64)
    biased = read("llama", attention_bias=True, mlp_bias=True).layers[0]
    assert biased.mixer.qkv_bias and biased.mixer.out_bias and biased.mlp == GatedMLP(48, bias=True)
    assert read("qwen2").layers[0].mixer.qkv_bias and not read("qwen2").layers[0].mixer.out_bias
    m2 = read("minimax_m2", rotary_dim=8).layers[0].mixer.rope
    assert m2 and m2.dim == 8 and read("minimax_m2").layers[0].mixer.rope.dim == 16
    tied = {name for name in FAMILIES if read(name).tie_word_embeddings}
    assert tied == {
        "gemma", "gemma2", "gemma3_text", "smollm3", "gpt2", "mamba", "falcon_mamba", "lfm2", "lfm2_moe", "llada",
        "ernie4_5", "starcoder2", "gemma3", "gemma4", "gemma4_text", "diffusion_gemma", "cohere", "cohere2",
        "gpt_bigcode", "opt", "gpt_neo", "vaultgemma", "youtu", "ernie4_5_moe", "falcon", "bloom", "mpt",
        "lfm3", "xglm", "gpt-sw3", "gemma4_unified", "gemma4_unified_text", "lara_mini", "cohere_compass_text",
        "cohere2_moe", "granite_swa", "minicpm3", "biogpt", "gpt_neox_japanese",
        "recurrent_gemma", "modernbert-decoder",
    }  # fmt: skip
    assert "hidden_size is not a multiple of num_attention_heads 5" in refusal("llama", num_attention_heads=5)
    assert read("llama", num_attention_heads=5, head_dim=8).layers[0].mixer.num_kv_heads == 5
    assert "num_attention_heads 4 is not a multiple of num_key_value_heads 3" in refusal("llama", num_key_value_heads=3)


def test_our_own_config() -> None:
    spec = read("gemma2")
    assert spec_from_config({"model_type": "ridgeline", "spec": to_json(spec)}) == spec
    assert {n: r.keys for n, r in family_of({"model_type": "ridgeline"}).names.reads(spec).items()} == {
        w.name: (w.name,) for w in spec.weights()
    }
    with pytest.raises(ConfigError, match="a model spec is an object"):
        spec_from_config({"model_type": "ridgeline"})
    with pytest.raises(ConfigError, match="made_up"):
        spec_from_config({"model_type": "ridgeline", "spec": to_json(spec), "made_up": 1})


# ---- the gated delta rule ----------------------------------------------------------------------------------

IN_TURN = ["linear_attention", "full_attention", "linear_attention", "full_attention"]


def kinds(spec: ModelSpec) -> list[str]:
    return [type(layer.mixer).__name__ for layer in spec.layers]


def test_layers_of_delta_and_of_attention() -> None:
    assert kinds(read("qwen3_next")) == ["GatedDelta"] * 3 + ["Attention"]
    assert kinds(read("qwen3_next", full_attention_interval=2)) == ["GatedDelta", "Attention"] * 2
    assert kinds(read("qwen3_next", full_attention_interval=2, layer_types=IN_TURN[::-1])) == [
        "Attention", "GatedDelta"
    ] * 2  # fmt: skip
    assert "layer_types must hold 4 entries" in refusal("qwen3_next", layer_types=IN_TURN[:3])
    assert "layer_types must hold 4 entries" in refusal("qwen3_5_text", layer_types=["sliding_attention"] * 4)
    assert "full_attention_interval is 0" in refusal("qwen3_5_text", full_attention_interval=0)
    assert kinds(read("kimi_linear", num_hidden_layers=6)) == [*["KimiDelta"] * 4, "LatentAttention", "KimiDelta"]
    published = {"full_attn_layers": [2, 4], "kda_layers": [3, 1]}
    assert kinds(read("kimi_linear", linear_attn_config=published)) == ["KimiDelta", "LatentAttention"] * 2
    assert kinds(read("kimi_linear", layer_types=IN_TURN)) == ["KimiDelta", "LatentAttention"] * 2
    for wrong in ({"full_attn_layers": [2, 4], "kda_layers": [1]}, {"full_attn_layers": [0, 1], "kda_layers": [2, 3]}):
        assert "must name each of the layers 1 to 4 once" in refusal("kimi_linear", linear_attn_config=wrong)
    sparse = [[isinstance(layer.mlp, MoE) for layer in read("qwen3_next", **f).layers] for f in (
        {}, {"mlp_only_layers": [0, 2]}, {"decoder_sparse_step": 2})]  # fmt: skip
    assert sparse == [[True] * 4, [False, True] * 2, [False, True] * 2]


def test_the_fields_that_the_delta_families_refuse() -> None:
    assert "attn_output_gate is False" in refusal("qwen3_5_text", attn_output_gate=False)
    assert "output_gate_type is 'sigmoid'" in refusal("qwen3_5_text", output_gate_type="sigmoid")
    assert "norm_topk_prob is False" in refusal("qwen3_5_moe_text", norm_topk_prob=False)
    assert "linear_num_value_heads 32 is not a multiple of linear_num_key_heads 7" in refusal(
        "qwen3_next", linear_num_key_heads=7
    )
    assert "mla_use_nope is False" in refusal("kimi_linear", mla_use_nope=False)
    assert "moe_router_activation_func is 'softmax'" in refusal("kimi_linear", moe_router_activation_func="softmax")
    bounded = {"head_dim": 8, "gate_lower_bound": -5.0}
    assert "linear_attn_config.gate_lower_bound: not understood" in refusal("kimi_linear", linear_attn_config=bounded)
    assert "n_group is 2, but num_expert_group is 4; both must be equal" in refusal(
        "kimi_linear", num_expert_group=4, n_group=2
    )


def test_fields_that_contradict_each_other_are_refused() -> None:
    for name, usual in (
        ("d_model", "hidden_size"), ("n_heads", "num_attention_heads"), ("n_layers", "num_hidden_layers"),
        ("max_seq_len", "max_position_embeddings"),
    ):  # fmt: skip
        value = REQUIRED["dbrx"][name]
        assert read("dbrx", **{usual: value}) == read("dbrx")
        assert f"{name} is {value}, but {usual} is 32; both must be equal" in refusal("dbrx", **{usual: 32})
    message = refusal("apertus1p5_text", output_vocab_size=20, tie_word_embeddings=True)
    assert message.startswith("config.json: output_vocab_size is 20, below vocab_size 32, and the head is tied")
    assert "set tie_word_embeddings to false" in message


def test_the_fields_that_laguna_refuses() -> None:
    assert "gating is 1; supported: true, per-head" in refusal("laguna", gating=1)
    assert "num_attention_heads_per_layer must hold 4 entries" in refusal("laguna", num_attention_heads_per_layer=[])
    assert read("laguna", num_attention_heads_per_layer=None, gating=True) == read("laguna")


def test_a_rotation_of_images_is_that_of_text() -> None:
    rope = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}
    images = {"mrope_section": [11, 11, 10], "mrope_interleaved": True}
    plain, more = (read("qwen3_5_text", rope_parameters=r) for r in (rope, rope | images))
    assert plain == more and plain.ropes() == (Rope(64, 1e7),)
    assert "rope_parameters.x: not understood" in refusal("qwen3_5_text", rope_parameters=rope | images | {"x": 1})


def test_a_language_model_inside_another() -> None:
    text = REQUIRED["qwen3_5"]["text_config"]
    alone = read("qwen3_5_text", **KV_HEADS)
    assert read("qwen3_5") == replace(alone, family="qwen3_5")
    assert "text_config is missing" in refusal("qwen3_5", text_config=None)
    assert "text_config.made_up: not understood" in refusal("qwen3_5", text_config=text | {"made_up": 1})
    assert "text_config.hidden_size is null" in refusal("qwen3_5", text_config=text | {"hidden_size": None})
    assert "audio_config: not understood" in refusal("qwen3_5", audio_config={})
    assert read("qwen3_5", tie_word_embeddings=True).tie_word_embeddings
    assert read("qwen3_5", text_config=text | {"tie_word_embeddings": True}).tie_word_embeddings
    both = {"tie_word_embeddings": False, "text_config": text | {"tie_word_embeddings": True}}
    assert "tie_word_embeddings is False, but in text_config it is True" in refusal("qwen3_5", **both)


# ---- names --------------------------------------------------------------------------------------------------

TIED = {"llada": "weight_tying"}  # other names of the field
# These families read the field only to refuse it, or not alone.
UNBIASED = ("phi3", "nemotron_h", "afmoe", "internlm3", "lfm3", "laguna")


@EVERY
def test_every_weight_has_its_rows_in_the_checkpoint(family: str) -> None:
    """No two weights share rows, and the parts of a fused tensor fill it."""
    biases = {"attention_bias": True} if "attention_bias" in fields_of(family) and family not in UNBIASED else {}
    spec = read(family, **{TIED.get(family, "tie_word_embeddings"): False}, **biases)
    reads = FAMILIES[family].names.reads(spec)
    assert list(reads) == [w.name for w in spec.weights()]
    whole: set[str] = set()
    rows: dict[str, list[tuple[int, int]]] = {}
    totals: dict[str, int] = {}
    for weight in spec.weights():
        r = reads[weight.name]
        assert len(r.keys) == (weight.shape[0] if r.stacked else 1)
        kept = weight.name.endswith("conv.weight")  # [channels, 1, taps] in the checkpoint, too
        kept |= (
            family.startswith("granitemoe") and ".experts.down" in weight.name
        )  # [expert, out, in] in the checkpoint, too
        every = (r.every is not None and weight.is_matrix) or r.expert_rows is not None
        assert (r.stacked or r.flat or every or r.blocks is not None) == (len(weight.shape) == 3 and not kept)
        for key in r.keys:
            assert key not in whole
            if r.every is not None:
                rows.setdefault(key, []).append((r.every[0], r.every[0] + 1))
                totals[key] = r.every[1]
            elif r.expert_rows is not None:
                *span, totals[key] = r.expert_rows
                rows.setdefault(key, []).append((span[0], span[1]))
            elif r.total_rows is None:
                whole.add(key)
            elif r.rows is not None:
                rows.setdefault(key, []).append(r.rows)
                totals[key] = r.total_rows
            elif r.group_rows is not None:
                groups, start, stop = r.group_rows
                assert (stop - start) * groups == weight.shape[0]
                rows.setdefault(key, []).append((start, stop))
                totals[key] = r.total_rows // groups
            else:
                assert r.head_part is not None
                index, count, head_dim = r.head_part
                mixer = spec.layers[int(weight.name.split(".")[1])].mixer
                assert isinstance(mixer, Attention)
                assert (weight.shape[0] * count, head_dim) == (r.total_rows, mixer.head_dim)
                rows.setdefault(key, []).append((index * weight.shape[0], (index + 1) * weight.shape[0]))
                totals[key] = r.total_rows
    assert not whole & set(rows)
    for key, spans in rows.items():
        edges = sorted(spans)
        assert [a for a, _ in edges] == [0, *(b for _, b in edges[:-1])]
        assert edges[-1][1] == totals[key]


def test_family_functions_stay_small() -> None:
    folder = Path(inspect.getfile(ridgeline.archs)).parent
    functions = {f.spec.__code__.co_name: Path(f.spec.__code__.co_filename) for f in FAMILIES.values()}
    assert len(functions) == len({f.spec for f in FAMILIES.values()})
    for path in folder.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and functions.get(node.name) == path:
                assert (node.end_lineno or 0) - node.lineno + 1 < 40, f"{path.name}: {node.name}"
                del functions[node.name]
    assert not functions  # the function of each family was found and measured
