"""The default of `speculative` never changes or refuses what works without drafts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from calibrated import KEPT
from typer.testing import CliRunner

from pure.test_clock import EXACT, MODELS
from ridgeline.cli.main import app
from ridgeline.cost.calibration import machine_of
from ridgeline.errors import RequestError
from ridgeline.plan.planner import Deployment
from ridgeline.settings import EngineConfig, EngineOptions, resolve
from ridgeline.settings.advice import Advice, advise
from ridgeline.settings.speculative import LEAST_STEP_S
from ridgeline.spec import ModelSpec

SPEC = MODELS["dense"]


def advice(step_s: float = 2 * LEAST_STEP_S) -> Advice:
    """Return the advice of an invented calibration, with the seconds of a decode step."""
    found = advise(Deployment(SPEC, machine_of(KEPT), EXACT))
    assert found is not None
    return replace(found, step_s=step_s)


def chosen(given: Advice | None, free_bytes: int = 1 << 36, spec: ModelSpec = SPEC, **options: Any) -> EngineConfig:
    """Return the settings. options: the options of the engine, and `undrafted`."""
    undrafted = options.pop("undrafted", None)
    return resolve(
        spec, 512, EngineOptions(**options), free_bytes=free_bytes, fixed_len=False, advice=given, undrafted=undrafted
    )


@pytest.mark.parametrize(
    "options", [{}, {"speculative": "auto"}, {"draft_depth": "chosen", "draft_acceptance": "same"}]
)
def test_a_calibrated_machine_looks_drafts_up(options: dict[str, str]) -> None:
    config = chosen(advice(), **options)
    assert (config.speculative, config.num_speculative_tokens, config.draft_depth) == ("ngram", 4, "chosen")
    assert "because this machine is calibrated" in config.reasons["speculative"]
    quick = chosen(advice(LEAST_STEP_S / 2), **options)
    assert quick.speculative == "off" and "a step is predicted to take 1 ms" in quick.reasons["speculative"]


@pytest.mark.parametrize(("options", "words"), [
    ({}, "not calibrated: run `ridgeline calibrate`"),
    ({"speculative": "auto"}, "not calibrated: run `ridgeline calibrate`"),
    ({"speculative": "off"}, "as given"),
])  # fmt: skip
def test_without_a_calibration_there_are_no_drafts(options: dict[str, str], words: str) -> None:
    config = chosen(None, **options)
    assert (config.speculative, config.num_speculative_tokens, config.draft_depth) == ("off", 0, "fixed")
    assert words in config.reasons["speculative"]


def test_explain_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = json.loads(CliRunner().invoke(app, ["explain", "pocket", "--json"]).output)
    (said,) = [setting for setting in found["settings"] if setting["name"] == "speculative"]
    assert (said["value"], said["override"]) == ("off", "--speculative")
    assert said["reason"] == "chosen, because this machine is not calibrated: run `ridgeline calibrate`"


@pytest.mark.parametrize(("options", "words"), [
    ({"steps_in_flight": 2}, "steps_in_flight is 2"),
    ({"num_speculative_tokens": 0}, "num_speculative_tokens is 0"),
    ({"num_speculative_tokens": 3}, "num_speculative_tokens is 3"),
    ({"draft_depth": "fixed"}, "draft_depth is fixed"),
    ({"draft_acceptance": "rejection"}, "draft_acceptance is rejection"),
    ({"undrafted": "a test"}, "a test"),
    ({"speculative": "off"}, "as given"),
])  # fmt: skip
def test_settings_that_drafts_do_not_fit_stay_as_they_are(options: dict[str, Any], words: str) -> None:
    config, before = chosen(advice(), **options), chosen(None, **options)
    assert config.speculative == "off" and words in config.reasons["speculative"]
    assert (config.num_speculative_tokens, config.draft_depth, config.steps_in_flight) == (
        before.num_speculative_tokens, before.draft_depth, before.steps_in_flight
    )  # fmt: skip


@pytest.mark.parametrize(("vocab_size", "words"), [(SPEC.vocab_size, "beside drafts"), (150_000, "drafts would take")])
def test_drafts_that_take_memory_from_others_are_left_out(vocab_size: int, words: str) -> None:
    """With any amount of memory, a calibrated machine fits what it fits without drafts."""
    reasons, spec = set(), replace(SPEC, vocab_size=vocab_size)
    for size in (float(2 ** (n / 2)) for n in range(28, 72)):
        try:
            plain = chosen(advice(), int(size), spec, speculative="off")
        except RequestError:
            with pytest.raises(RequestError):
                chosen(advice(), int(size), spec)
            continue
        config = chosen(advice(), int(size), spec)
        reasons.add(config.reasons["speculative"])
        assert (config.max_model_len, config.max_num_seqs, config.max_num_batched_tokens) == (
            plain.max_model_len, plain.max_num_seqs, plain.max_num_batched_tokens,
        )  # fmt: skip
        assert config.workspace_bytes - plain.workspace_bytes <= size / 10
    assert any("calibrated" in reason for reason in reasons)
    assert any(words in reason for reason in reasons)
