"""The oracle judges the engine, and these tests judge the oracle.

A case is useful only if float32 noise cannot change its greedy tokens, and if every feature that it claims to exercise
moves the logits by more than the tolerance of a comparison.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from torch import nn

from oracle.build import (
    DERIVED,
    NEW_ONLY,
    PLAIN,
    Float64,
    build,
    class_for,
    double,
    make_model,
    measure,
    oracle_greedy,
    oracle_logits,
    oracle_margins,
    print_table,
    respell,
    to_v4_config,
    variant,
)
from oracle.case import SPECIAL_TOKENS, VOCAB, Case, greedy_prompt, prompts
from oracle.causal_types import EXCLUDED, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, unserved
from oracle.families import CASES
from oracle.page import published_rows, written_rows
from pure.published import PUBLISHED
from ridgeline.archs import FAMILIES, spec_from_config
from shares import ONE_OF_EACH, daily

# Families without a field of rotations.
ROTATES_NOTHING = (
    "gpt2", "mamba", "falcon_mamba", "mamba2", "jamba", "kimi_linear", "nemotron_h", "gptj", "codegen", "gpt_bigcode",
    "opt", "biogpt", "gpt_neo", "bloom", "mpt", "gpt-sw3", "xglm",
)  # fmt: skip
ENCODERS = re.compile(r"vision_tower|vision_model|multi_modal_projector")  # encoders of images are not loaded
TOLERANCE = 1e-4  # for our float32 logits against transformers' float64
SAFE_MARGIN = 1e-3  # smallest lead of a greedy token; ten times the largest float32 noise on any CPU
ALL = pytest.mark.parametrize("name", CASES)
GREEDY = pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.greedy_tokens])
TOGGLES = pytest.mark.parametrize(
    ("name", "index"), [(name, i) for name, case in CASES.items() for i in range(len(case.toggles))]
)


@lru_cache(maxsize=2)
def built(name: str) -> nn.Module:
    """Return the case's model; the parametrized tests use one case after the other."""
    return build(CASES[name])


@lru_cache(maxsize=2)
def logits_of(name: str) -> list[np.ndarray]:
    return oracle_logits(built(name), prompts(CASES[name]))


def largest_difference(left: list[np.ndarray], right: list[np.ndarray]) -> float:
    return max(float(np.abs(a - b).max()) for a, b in zip(left, right, strict=True))


@ALL
def test_float32_noise_is_far_below_the_margins(name: str) -> None:
    """Transformers' greedy tokens are computed in float32, so on this CPU they must equal those of float64."""
    exact = oracle_logits(double(built(name)), prompts(CASES[name]))
    assert all(row.dtype == np.float64 and np.isfinite(row).all() for row in exact)
    assert largest_difference(logits_of(name), exact) < SAFE_MARGIN / 10
    assert 0.5 < float(np.std(exact[-1])) < 3.0


@pytest.mark.nightly
@GREEDY
def test_greedy_is_decided_by_safe_margins(name: str) -> None:
    found = measure(CASES[name])
    assert np.isfinite(found["margin"])
    assert found["margin"] > max(SAFE_MARGIN, 10 * found["noise"])
    assert found["special"] == 0
    assert found["distinct"] >= 10
    assert found["gap"] > 3e-4


@TOGGLES
def test_each_feature_moves_the_logits(name: str, index: int) -> None:
    case = CASES[name]
    other = variant(case, built(name), case.toggles[index])
    assert largest_difference(oracle_logits(other, prompts(case)), logits_of(name)) > 3 * TOLERANCE


@pytest.mark.parametrize("name", daily(CASES, ONE_OF_EACH & CASES.keys(), slow=False))
def test_saved_models_load_in_both_spellings(name: str, tmp_path: Path) -> None:
    case, model = CASES[name], built(name)
    exact = oracle_logits(double(model), prompts(case))
    noise = largest_difference(logits_of(name), exact)
    build(case, tmp_path / "new")
    respell(tmp_path / "new", tmp_path / "old")
    configs = []
    for folder in ("new", "old"):
        loaded = class_for(case.model_type).from_pretrained(tmp_path / folder, dtype=torch.float32, **PLAIN)
        assert all(torch.equal(value, model.state_dict()[key]) for key, value in loaded.state_dict().items())
        # The last bit may differ, because the alignment of the weights in memory may.
        assert largest_difference(oracle_logits(loaded.eval(), prompts(case)), exact) < 2 * noise
        configs.append(loaded.config.to_dict())
    new, old = configs
    if "rope_parameters" in old:
        old["rope_parameters"].pop("type", None)  # it is read and kept beside the rope_type
    differing = {key: (new[key], old.get(key)) for key in new if new[key] != old.get(key)}
    assert differing.keys() <= {"_name_or_path", "transformers_version"}


@ALL
def test_lengths_fit(name: str) -> None:
    case = CASES[name]
    assert max(case.lengths) <= case.max_model_len
    if case.greedy_tokens:
        assert case.greedy_prompt_length + case.greedy_tokens <= case.max_model_len
    assert all(set(tokens).isdisjoint(SPECIAL_TOKENS) and max(tokens) < VOCAB for tokens in prompts(case))


def test_every_parameter_is_redrawn() -> None:
    for name, case in CASES.items():
        drawn, initial = built(name).state_dict(), make_model(case).state_dict()
        same = [key for key in drawn if torch.equal(drawn[key], initial[key]) and not key.endswith(DERIVED)]
        assert not same, f"{name}: {same}"
        several = (value for key, value in drawn.items() if not key.endswith(DERIVED) and value.numel() > 1)
        assert all(float(value.std()) > 0.05 for value in several)


def test_a_seed_fixes_a_model_and_its_prompts() -> None:
    case = CASES["qwen3_moe"]
    first, again, other = build(case), build(case), build(case, seed=case.seed + 1)
    assert all(torch.equal(value, again.state_dict()[key]) for key, value in first.state_dict().items())
    assert not torch.equal(first.lm_head.weight, other.lm_head.weight)
    assert prompts(case) == prompts(case)


def test_greedy_and_margins_agree() -> None:
    case = CASES["gemma2"]
    model, prompt = built("gemma2"), greedy_prompt(case)
    ids, margin = oracle_greedy(model, prompt, 12)
    margins = oracle_margins(model, prompt, ids)
    assert margins.shape == (12,)
    assert margin == pytest.approx(float(margins.min()), abs=TOLERANCE)
    assert oracle_margins(model, prompt, [*ids[:5], (ids[5] + 1) % VOCAB])[-1] < 0
    assert oracle_greedy(double(model), prompt, 12)[0] == ids


def test_float64_is_more_than_a_double_of_the_weights() -> None:
    """Without the mode, norms and softmax round to float32, and the run is not a reference for float32."""
    model = double(built("llama"))
    tokens = prompts(CASES["llama"])[-1]
    exact = oracle_logits(model, [tokens])[0]
    with torch.no_grad():
        mixed = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0].numpy()
    assert 1e-9 < np.abs(mixed - exact).max() < TOLERANCE


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.model_type not in NEW_ONLY])
def test_old_spelling_has_no_new_words(name: str) -> None:
    config = make_model(CASES[name]).config.to_dict() | {"dtype": "float32"}
    old = json.loads(json.dumps(to_v4_config(config)))
    old = old["text_config"] if CASES[name].model_type == "gemma3" else old
    assert not {"rope_parameters", "dtype", "_sliding_window_pattern"} & set(old)
    assert old["torch_dtype"] == "float32"
    assert CASES[name].model_type in ROTATES_NOTHING or "rope_scaling" in old


# A published model type without a class in transformers -> the same model as transformers spells it.
RESPELLED = {
    name: "MiniMaxAI/MiniMax-Text-01-hf"
    for name, (fields, _) in PUBLISHED.items()
    if fields["model_type"] in ("minimax_text_01", "minimax_m1")
}


@pytest.mark.parametrize("name", RESPELLED)
def test_a_published_spelling_has_the_weights_of_transformers_one(name: str) -> None:
    weights = [list(spec_from_config(PUBLISHED[n][0]).weights()) for n in (name, RESPELLED[name])]
    assert weights[0] == weights[1]
    assert PUBLISHED[name][1] == PUBLISHED[RESPELLED[name]][1]


@pytest.mark.nightly
@pytest.mark.parametrize("name", [name for name in PUBLISHED if name not in RESPELLED])
def test_published_counts_are_those_of_transformers(name: str) -> None:
    fields, params = PUBLISHED[name]
    unread = (("rope_scaling", None),)  # some class warns about it, even if it is null
    fields = {k: v for k, v in fields.items() if k != "quantization_config" and (k, v) not in unread}
    config = transformers.CONFIG_MAPPING[fields["model_type"]].from_dict(json.loads(json.dumps(fields)))
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    stored = model.state_dict()  # a bias without a gradient is a buffer there
    own = [(name, b) for name, b in model.named_buffers() if name in stored and not name.endswith(DERIVED)]
    counted = {id(x): x.numel() for name, x in (*model.named_parameters(), *own) if not ENCODERS.search(name)}
    assert sum(counted.values()) == params


def test_the_cases_alone_need_no_torch() -> None:
    """Reading the cases must stay cheap: only building them needs torch."""
    code = "import sys, oracle.families; sys.exit('torch' in sys.modules)"
    root = Path(__file__).parents[1]
    assert subprocess.run([sys.executable, "-c", code], cwd=root, check=False).returncode == 0


def test_the_documentation_has_a_row_for_each_case() -> None:
    text = (Path(__file__).parents[2] / "docs/models.md").read_text()
    assert sorted(re.findall(r"^\| (\w+) \| [\w-]+ \| \d\.\de", text, re.MULTILINE)) == sorted(CASES)


@pytest.mark.parametrize("name", ["phimoe", "phimoe_longrope", "llama_gqa"])
def test_the_float64_model_keeps_float32_frequencies(name: str) -> None:
    """A class that computes its frequencies in each pass must not compute better ones than those of the model."""
    model = build(CASES[name])
    (single,) = (m for m in model.modules() if hasattr(m, "inv_freq"))
    (precise,) = (m for m in double(model).modules() if hasattr(m, "inv_freq"))
    positions = torch.arange(150)[None]
    with Float64():
        cos, _ = precise(torch.zeros(1, 150, 8, dtype=torch.float64), positions)
    angles = positions[..., None].double() * single.inv_freq.double()
    expected = torch.cat((angles, angles), -1).cos()
    assert (cos / cos[0, 0, 0] - expected).abs().max() < 1e-14


def test_the_published_models_of_the_page_are_those_of_the_catalog() -> None:
    written, found = written_rows(), published_rows()
    assert len(written) > 50 and written.items() <= found.items()


@pytest.mark.nightly
def test_the_page_has_the_largest_published_model_of_each_type() -> None:
    assert written_rows() == published_rows(), "cd tests && python -m oracle.page writes the table"


def test_table(capsys: pytest.CaptureFixture[str]) -> None:
    case: Case = CASES["gpt2_tied"]
    print_table({"gpt2_tied": case})
    out = capsys.readouterr().out.splitlines()
    assert len(out) == 2
    assert out[1].startswith("gpt2_tied")


def test_types_that_are_excluded_exist_and_are_not_served() -> None:
    types = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    assert types >= set(EXCLUDED) and not set(EXCLUDED) & set(FAMILIES)
    assert set(unserved()) == types - set(FAMILIES)
