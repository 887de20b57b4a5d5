"""Published models from their config.json alone: exact parameter counts, and the JSON form."""

from __future__ import annotations

import json

import pytest
from published import PUBLISHED

from ridgeline.archs import FAMILIES, spec_from_config
from ridgeline.cli.flags.known import StoredMatrices
from ridgeline.cli.inspect import describe
from ridgeline.spec import from_json, to_json
from ridgeline.spec.quant import AS_STORED
from ridgeline.spec.storage import STORAGES


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_model(name: str) -> None:
    config, count = PUBLISHED[name]
    spec = spec_from_config(config)
    assert spec.num_params() == count
    assert from_json(json.loads(json.dumps(to_json(spec)))) == spec


@pytest.mark.parametrize(
    ("name", "per_layer", "layers"),
    [
        ("deepseek-ai/DeepSeek-V2-Lite", 576, 27),
        ("deepseek-ai/DeepSeek-V2", 576, 60),
        ("deepseek-ai/DeepSeek-V3", 576, 61),
    ],
)
def test_latent_state(name: str, per_layer: int, layers: int) -> None:
    """A latent has 512 numbers and 64 rotated ones (arXiv:2405.04434, table 1: 4.5 d_h, with heads of 128)."""
    spec = spec_from_config(PUBLISHED[name][0])
    assert spec.state_elements(1) == per_layer * layers
    assert spec.state_elements(1000) == 1000 * per_layer * layers
    assert spec.resolve_max_model_len(None) == 163840


def test_minimax_has_the_papers_active_parameters_and_state() -> None:
    """arXiv:2501.08313: 45.9 of 456 billion parameters are active per token, without the embedding and the head. The
    state is the matrices of 70 layers and the rows of the 10 others.
    """
    spec = spec_from_config(PUBLISHED["MiniMaxAI/MiniMax-Text-01"][0])
    assert spec.num_active_params() - 2 * 200_064 * 6144 == pytest.approx(45.9e9, rel=2e-3)
    assert spec.state_elements(1000) == 70 * 64 * 128 * 128 + 1000 * 10 * 2 * 8 * 128


# Families without a published model in the catalog: nobody has read a config of theirs from a public source yet.
UNREAD = {
    "afmoe", "bloom", "cwm", "ernie4_5_moe", "exaone", "exaone_moe", "falcon", "falcon_h1", "flex_olmo",
    "glm4_moe_lite", "hyperclovax", "internlm3", "iquestcoder", "jais2", "ministral", "mpt", "persimmon", "sarvam_mla",
    "sarvam_moe",
    "solar_open", "vaultgemma", "youtu", "granite_swa", "granitemoe_swa", "mellum", "flint", "hy_v3", "minicpm3",
    "biogpt", "gpt_neox_japanese", "hunyuan_v1_dense", "hunyuan_v1_moe", "ministral3", "mistral3",
    "apertus", "axk1", "cohere2_moe", "kolibri1", "nanochat", "nemotron", "olmo", "phimoe",
    "gemma4_unified_text", "gemma4_unified", "gpt-sw3", "lara_mini", "cohere_compass_text", "llama4_text", "llama4",
    "xglm", "glm_moe_dsa", "olmo_hybrid", "lfm3", "laguna", "apertus1p5_text", "beam", "modernbert-decoder",
}  # fmt: skip


def test_every_family_has_a_published_model() -> None:
    assert {config["model_type"] for config, _ in PUBLISHED.values()} == set(FAMILIES) - UNREAD


def test_inspect_counts_recurrent_state_in_float32() -> None:
    """Jamba: 4 layers with 8 heads of 128 in 16 bits, and 28 with 8,192 channels of 16 numbers and 3 tokens
    in 32 bits.
    """
    spec = spec_from_config(PUBLISHED["ai21labs/Jamba-v0.1"][0])
    report = describe(spec, "bfloat16", None, StoredMatrices(AS_STORED), STORAGES["bfloat16"])
    recurrent, per_token = 28 * 8192 * (16 + 3) * 4, 4 * 2 * 8 * 128 * 2
    assert report["recurrent_state_bytes"] == recurrent
    assert report["state_bytes_per_token"] == per_token
    assert report["state_bytes_at_max_len"] == recurrent + 262144 * per_token
