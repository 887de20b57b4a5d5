"""Rounds of drafts that run from a recording draw the tokens that the host draws, for each request as it says."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from cpu.test_draft_model import answers_of, draft_of
from cpu.test_draft_model import settings as model_settings
from cpu.test_drafts import DRAFTS, NEW_TOKENS, PROMPTS, Answers, loaded
from cpu.test_head_drafts import head_of
from cpu.test_head_drafts import settings as head_settings
from oracle.mixers import FULL, NORM, VOCAB, WIDTH
from ridgeline import LLM, SamplingParams
from ridgeline.engine import Engine
from ridgeline.runtime.draft_rounds import DraftRounds
from ridgeline.runtime.generator import GenerationRequest
from ridgeline.runtime.load import LoadedModel
from ridgeline.sample.sampler import NoiseKey
from ridgeline.spec import GatedMLP, Layer, ModelSpec, to_json

# Greedy and sampled requests of one batch; the last one has edits, which drafts ignore.
MIXED: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 20},
    {"temperature": 1.3, "top_p": 0.9, "min_p": 0.05},
    {"temperature": 0.4, "repetition_penalty": 1.3, "logprobs": 2},
)


@cache
def wide() -> LoadedModel:
    """Return a draft model with three tokens more than its target has, which must not be drawn."""
    with TemporaryDirectory() as folder:
        spec = ModelSpec("draft", VOCAB + 3, WIDTH, 256, (Layer(FULL, GatedMLP(16), NORM),), NORM)
        config = {"model_type": "ridgeline", "spec": to_json(spec)}
        (Path(folder) / "config.json").write_text(json.dumps(config))
        return LLM(folder, load_format="dummy", skip_tokenizer_init=True, cache="off").loaded


def open_engine(draft: str, **options: Any) -> Engine:
    """Return an engine whose drafter is a draft model or an EAGLE head."""
    if draft.startswith("eagle"):
        return Engine(loaded("attention"), head_settings(draft, **options), draft=head_of(draft))
    if draft == "wide":
        return Engine(loaded("attention"), model_settings("attention", "full", **options), draft=wide())
    return Engine(loaded("attention"), model_settings("attention", draft, **options), draft=draft_of(draft))


def serve(engine: Engine, several: tuple[dict[str, Any], ...], monkeypatch: pytest.MonkeyPatch) -> tuple[Answers, Any]:
    """Return the answers to all prompts, and the drafts of each step."""
    drafter: Any = engine._runner.drafter
    run, said = drafter.draft, []

    def noted(asks: Any, **options: Any) -> Any:
        said.append(run(asks, **options))
        return said[-1]

    monkeypatch.setattr(drafter, "draft", noted)
    for i, (prompt, own) in enumerate(zip(PROMPTS, several, strict=True)):
        params = SamplingParams(max_tokens=NEW_TOKENS - i, ignore_eos=True, **own)
        engine.add(i, GenerationRequest(prompt, params, (NoiseKey(2**64 - 1 - i, 0),)))
    return answers_of(engine), said


def rounds_of(engine: Engine) -> DraftRounds:
    drafter: Any = engine._runner.drafter
    found: DraftRounds = drafter._rounds
    return found


@pytest.mark.parametrize("draft", ["full", "local", "wide", "eagle", "eagle3"])
def test_recorded_rounds_draw_what_the_host_draws(draft: str, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded, single = open_engine(draft), open_engine(draft)
    found = serve(recorded, MIXED, monkeypatch)
    monkeypatch.setattr(rounds_of(single)._passes, "refusal", "not in this test")
    assert serve(single, MIXED, monkeypatch) == found
    assert any(len({draft.token for draft in drafts}) > 1 for step in found[1] for drafts in step)
    if rounds_of(recorded)._passes.refusal is None:
        assert max(rounds for *_, rounds in rounds_of(recorded)._graphs) == DRAFTS


@pytest.mark.parametrize(
    ("own", "options"),
    [({"typical_p": 0.9}, {}), ({}, {"draft_acceptance": "rejection"}), ({"temperature": 1e-31}, {})],
    ids=["another filter", "rejection", "a tiny temperature"],
)
def test_what_no_kernel_draws_goes_through_the_host(
    own: dict[str, Any], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = open_engine("full", **options)
    answers, said = serve(engine, (*MIXED[:4], {"temperature": 1.0, **own}), monkeypatch)
    assert len(answers) == len(PROMPTS) and engine.stats().draft_tokens > 0
    assert any(draft.q is not None for step in said for drafts in step for draft in drafts) == bool(options)
    if rounds_of(engine)._passes.refusal is None:
        assert {rounds for *_, rounds in rounds_of(engine)._graphs} & {1}
