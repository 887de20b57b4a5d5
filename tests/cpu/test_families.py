"""Every family against transformers: transformers makes a tiny random model, and Ridgeline loads it."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path

import numpy as np
import pytest

from oracle.build import build, double, oracle_logits, respell, to_v4_config
from oracle.case import Case, prompts
from oracle.compare import compare
from oracle.families import CASES
from ridgeline import LLM
from ridgeline.archs import FAMILIES
from ridgeline.load.checkpoint import open_checkpoint
from ridgeline.nn import Model
from ridgeline.runtime.step import DenseStep

# Tolerances of the logits, against transformers in float64, which is equal on all CPUs: for float32 kernels, and for
# device `reference` in float64. The second differs by float32 frequencies of RoPE and float32 logits.
TOLERANCE, EXACT_TOLERANCE = 1e-4, 1e-5
# Beyond the trained length transformers computes dynamic frequencies again in each call, in float32. Its float64 logits
# contain this rounding too, so the tolerance is twice the error of its float32 logits in the same run.
ROUNDED_FREQUENCIES = {"llama_dynamic_long"}


@pytest.mark.parametrize("name", CASES)
def test_logits_and_greedy_tokens_equal_transformers(name: str, tmp_path: Path) -> None:
    c = compare(CASES[name], tmp_path, device="cpu")
    assert c.error < TOLERANCE
    assert c.logit_std > 0.5  # a model whose logits hardly vary would hide differences
    if c.greedy_equal is not None:
        assert c.margin is not None
        assert c.margin > 1e-4
        assert c.greedy_equal


@pytest.mark.parametrize("name", CASES)
def test_logits_of_the_reference_device_equal_transformers(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    model = build(case, tmp_path)
    llm = LLM(str(tmp_path), max_model_len=case.max_model_len, device="reference")
    rounded = [row.copy() for row in oracle_logits(model, prompts(case))] if name in ROUNDED_FREQUENCIES else []
    exact = oracle_logits(double(model), prompts(case))
    noise = max((float(np.abs(a - b).max()) for a, b in zip(rounded, exact, strict=False)), default=0.0)
    for got, wanted in zip(llm.logits(prompts(case)), exact, strict=True):
        assert np.abs(got - wanted).max() < max(EXACT_TOLERANCE, 2 * noise)


def test_every_family_has_a_case() -> None:
    respelled = {"minimax_text_01", "minimax_m1"}  # other spellings of minimax, see pure/test_archs.py
    # transformers has Qwen 3, which test_sdar.py gives another mask; the other diffusion models have definitions in
    # oracle/llada.py and oracle/llada2.py; transformers' DiffusionGemma is in test_canvas.py
    elsewhere = {"sdar", "llada2_moe", "llada", "Dream", "diffusion_gemma"}
    assert {case.model_type for case in CASES.values()} == set(FAMILIES) - respelled - elsewhere


# One case for each variant of attention; the test above uses the fused kernel where it can.
@pytest.mark.parametrize("name", ["llama_gqa", "qwen2_window", "gemma3", "phi3_partial", "gpt_neox"])
def test_reference_attention_equals_transformers(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    model = build(case, tmp_path)
    options = {"device": "reference", "ops": {"attention": "reference"}}
    llm = LLM(str(tmp_path), max_model_len=case.max_model_len, **options)
    for got, wanted in zip(llm.logits(prompts(case)), oracle_logits(double(model), prompts(case)), strict=True):
        assert np.abs(got - wanted).max() < EXACT_TOLERANCE


@pytest.mark.parametrize("name", CASES)
def test_both_spellings_of_the_config_give_one_spec(name: str, tmp_path: Path) -> None:
    """transformers 4 wrote rope_theta and rope_scaling, transformers 5 writes rope_parameters."""
    new = tmp_path / "new"
    build(CASES[name], new)
    old = respell(new, tmp_path / "old")
    config = json.loads((new / "config.json").read_text())
    assert to_v4_config(config) == json.loads((old / "config.json").read_text())
    assert open_checkpoint(old).spec == open_checkpoint(new).spec


# Interleaved q, k, v; experts stored one by one; norms before and after each branch; transposed matrices and a tied
# head; fused matrices; experts in one tensor with gate and up interleaved; a matrix per head.
@pytest.mark.parametrize("name", ["gpt_neox", "qwen3_moe", "gemma2", "gpt2_tied", "phi3", "gpt_oss", "deepseek_v3"])
def test_our_own_config_file_gives_the_same_logits(name: str, tmp_path: Path) -> None:
    """config.json contains the spec, and the tensors have our names."""
    from safetensors.numpy import save_file

    from ridgeline.spec import to_json

    case = CASES[name]
    build(case, tmp_path / "hf")
    llm = LLM(str(tmp_path / "hf"))
    ours = tmp_path / "ours"
    ours.mkdir()
    weights = {name: llm.loaded.table.memory.get(w) for name, w in llm.loaded.model.weights.items()}
    shapes = {w.name: w.shape for w in llm.loaded.spec.weights()}
    assert {name: w.shape for name, w in weights.items()} == shapes  # experts in one stack, no head if it is tied
    assert ("head.weight" in shapes) != case.tied
    save_file({name: np.ascontiguousarray(w) for name, w in weights.items()}, ours / "model.safetensors")
    (ours / "config.json").write_text(json.dumps({"model_type": "ridgeline", "spec": to_json(llm.loaded.spec)}))
    again = LLM(str(ours))
    assert again.loaded.spec == llm.loaded.spec
    for a, b in zip(again.logits(prompts(case)), llm.logits(prompts(case)), strict=True):
        assert np.abs(a - b).max() < TOLERANCE / 5
    np.testing.assert_array_equal(logits_from_memory(again, case), logits_from_memory(llm, case))


def logits_from_memory(llm: LLM, case: Case) -> np.ndarray:
    """Return logits that are computed with copied weights, because the alignment of weights in a file can change the
    last digit.
    """
    loaded = llm.loaded
    weights = {name: deepcopy(w) for name, w in loaded.model.weights.items()}
    model, memory = Model(loaded.spec, weights, loaded.table, loaded.max_model_len), loaded.table.memory
    return memory.get(model(DenseStep.build(prompts(case), memory)))
