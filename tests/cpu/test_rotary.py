"""Rotation frequencies against transformers' own functions: they differ by one or two units of float32's last digit at
most.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from transformers import GlmConfig, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.glm.modeling_glm import GlmRotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from ridgeline.archs import spec_from_config
from ridgeline.nn.rotary import FrequencyTables, frequencies
from ridgeline.spec import ModelSpec, Rope
from ridgeline.spec.regimes import regimes_of

CONTEXT = 16384  # max_position_embeddings of every config here
SIZES: dict[str, Any] = {
    "vocab_size": 8, "hidden_size": 64, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2,
    "max_position_embeddings": CONTEXT,
}  # fmt: skip


def ours(head_dim: int, length: int, rope: dict[str, Any]) -> tuple[np.ndarray, float]:
    """Return the frequencies for a context of `length` tokens, from the fields of a config."""
    (found,) = spec_of(head_dim, rope).ropes()
    return frequencies(found, length)


def spec_of(head_dim: int, rope: dict[str, Any]) -> ModelSpec:
    family = "glm" if "partial_rotary_factor" in rope else "llama"  # this family rotates whole heads
    return spec_from_config({"model_type": family, **SIZES, "head_dim": head_dim, "rope_parameters": dict(rope)})


def theirs(head_dim: int, length: int, rope: dict[str, Any]) -> tuple[np.ndarray, float]:
    config_class = GlmConfig if rope["rope_type"] == "default" else LlamaConfig
    config = config_class(**SIZES, head_dim=head_dim, rope_parameters=dict(rope))
    if rope["rope_type"] != "default":
        inverse, factor = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, seq_len=length)
    elif "partial_rotary_factor" in rope:
        inverse, factor = GlmRotaryEmbedding.compute_default_rope_parameters(config)
    else:
        inverse, factor = LlamaRotaryEmbedding.compute_default_rope_parameters(config)
    return inverse.numpy(), factor


def longrope(half: int, **more: Any) -> dict[str, Any]:
    short, long = np.linspace(1.0, 2.3, half).tolist(), np.geomspace(1.1, 60.0, half).tolist()
    return {"rope_type": "longrope", "short_factor": short, "long_factor": long, **more}


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ORIGINAL = {"original_max_position_embeddings": 1024}
# Maps a kind to the head size, the longest context to serve, and the fields of the rotation.
CASES: dict[str, tuple[int, int, dict[str, Any]]] = {
    "default": (128, CONTEXT, {"rope_type": "default"}),
    "default_odd": (26, CONTEXT, {"rope_type": "default"}),
    "default_partial": (128, CONTEXT, {"rope_type": "default", "partial_rotary_factor": 0.5}),
    "linear": (128, CONTEXT, {"rope_type": "linear", "factor": 8.0}),
    "linear_partial": (96, CONTEXT, {"rope_type": "linear", "factor": 3.7, "partial_rotary_factor": 0.75}),
    "dynamic_short": (128, 100, {"rope_type": "dynamic", "factor": 4.0}),
    "dynamic_at": (128, CONTEXT, {"rope_type": "dynamic", "factor": 4.0}),
    "dynamic_long": (128, CONTEXT + 1, {"rope_type": "dynamic", "factor": 4.0}),
    "dynamic_longer": (64, 4 * CONTEXT, {"rope_type": "dynamic", "factor": 4.0}),
    "dynamic_partial": (96, 3 * CONTEXT, {"rope_type": "dynamic", "factor": 2.5, "partial_rotary_factor": 0.25}),
    "llama3": (128, CONTEXT, {**LLAMA3, "factor": 8.0, "original_max_position_embeddings": 8192}),
    "llama3_32": (64, CONTEXT, {**LLAMA3, "factor": 32.0, "original_max_position_embeddings": 8192}),
    "llama3_narrow": (128, CONTEXT, {**LLAMA3, **ORIGINAL, "factor": 8.0, "low_freq_factor": 3.0}),
    "llama3_partial": (96, CONTEXT, {**LLAMA3, **ORIGINAL, "factor": 8.0, "partial_rotary_factor": 0.5}),
    "yarn": (128, CONTEXT, YARN),
    "yarn_no_truncate": (128, CONTEXT, {**YARN, "truncate": False}),
    "yarn_betas": (64, CONTEXT, {**YARN, "beta_fast": 12.0, "beta_slow": 0.4}),
    "yarn_betas_no_truncate": (64, CONTEXT, {**YARN, "beta_fast": 12.0, "beta_slow": 0.4, "truncate": False}),
    "yarn_no_ramp": (64, CONTEXT, {**YARN, "beta_fast": 4.0, "beta_slow": 4.0, "truncate": False}),
    "yarn_mscale": (64, CONTEXT, {**YARN, "factor": 40.0, "mscale": 1.4, "mscale_all_dim": 0.6}),
    "yarn_mscale_alone": (64, CONTEXT, {**YARN, "mscale": 1.4}),
    "yarn_attention_factor": (64, CONTEXT, {**YARN, "attention_factor": 1.3}),
    "yarn_shrinking": (64, CONTEXT, {**YARN, "factor": 0.8}),
    "yarn_partial": (96, CONTEXT, {**YARN, "partial_rotary_factor": 0.5}),
    "longrope_short": (96, 1024, longrope(48, **ORIGINAL)),
    "longrope_long": (96, 1025, longrope(48, **ORIGINAL)),
    "longrope_factor": (96, CONTEXT, longrope(48, **ORIGINAL, factor=16.0)),
    "longrope_attention_factor": (96, CONTEXT, longrope(48, **ORIGINAL, attention_factor=1.3)),
    "longrope_not_stretched": (96, CONTEXT, longrope(48, original_max_position_embeddings=CONTEXT)),
    "longrope_partial": (96, CONTEXT, longrope(36, **ORIGINAL, partial_rotary_factor=0.75)),
}


@pytest.mark.parametrize("theta", [10_000.0, 500_000.0, 1_000_000.0, 3000.0])
@pytest.mark.parametrize("name", CASES)
def test_frequencies(name: str, theta: float) -> None:
    head_dim, length, rope = CASES[name]
    rope = {**rope, "rope_theta": theta}
    (inverse, factor), (wanted, wanted_factor) = ours(head_dim, length, rope), theirs(head_dim, length, rope)
    assert inverse.dtype == wanted.dtype == np.float32
    np.testing.assert_allclose(inverse, wanted, rtol=3e-7, atol=0)
    assert factor == wanted_factor


@pytest.mark.parametrize("scaling", ["dynamic_at", "longrope_short"])
def test_tables_hold_the_frequencies_of_each_length(scaling: str) -> None:
    head_dim, _, rope = CASES[scaling]
    length = CONTEXT + 5000
    (found,) = spec_of(head_dim, {**rope, "rope_theta": 3000.0}).ropes()
    tables = FrequencyTables(regimes_of([found.scaling], length))
    rows, factor = tables.table(found)
    assert rows.dtype == np.float32
    for context in (1, 1024, 1025, CONTEXT, CONTEXT + 1, CONTEXT + 4097, length):
        wanted, wanted_factor = frequencies(found, context)
        (row,) = tables.rows(np.array([0]), np.array([context - 1]))
        assert np.array_equal(rows[row], wanted) and factor == wanted_factor
        assert tables.rows(np.array([context]), np.array([0])).tolist() == [row]


def test_scalings_differ() -> None:
    """The cases differ from one another, so a scaling that is not applied cannot pass."""
    plain = frequencies(Rope(128), CONTEXT)[0]
    for name in ("linear", "dynamic_long", "llama3", "yarn", "yarn_no_truncate"):
        assert np.abs(ours(*CASES[name][:2], CASES[name][2])[0] / plain - 1).max() > 1e-4, name
    pairs = [("yarn", "yarn_no_truncate"), ("longrope_short", "longrope_long"), ("dynamic_at", "dynamic_long")]
    for one, other in pairs:
        a, b = (ours(*CASES[n][:2], CASES[n][2])[0] for n in (one, other))
        assert np.abs(a / b - 1).max() > 1e-4, (one, other)
    assert np.array_equal(ours(*CASES["dynamic_short"][:2], CASES["dynamic_short"][2])[0], plain)
