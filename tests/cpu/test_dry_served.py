"""DRY and XTC in the engine: preemption, prefix hits, forks, chunks and steps in flight change no token."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from oracle.ours import SPECS, write
from ridgeline import LLM
from ridgeline.runtime.load import LoadedModel
from ridgeline.sample.dry import Dry
from ridgeline.verify import requests
from ridgeline.verify.baseline import Baseline
from ridgeline.verify.matrix import DEFAULT, Case, Scale
from ridgeline.verify.requests import REPEATING, Prompts, rounds
from ridgeline.verify.run import run_case

NEW_TOKENS = 16
CASES: dict[str, dict[str, Any]] = {
    "recompute": {"preempt": "recompute", "others": 3},
    "swap": {"preempt": "swap", "others": 3, "steps_in_flight": 2},
    "prefix hit, chunks": {"prefix": "hit", "chunk": 7, "others": 3},
    "forks": {"n": 4, "page": 4},
    "chunks, 2 in flight": {"chunk": 7, "others": 3, "steps_in_flight": 2},
    "drafts": {"drafts": 4, "wrong": 0.5},
}


@cache
def loaded() -> LoadedModel:
    with TemporaryDirectory() as folder:
        write(SPECS["cla2"], folder)
        return LLM(folder, cache="off", device="cpu").loaded


@cache
def naive() -> Baseline:
    return Baseline(loaded())


def scale() -> Scale:
    return Scale(longest=loaded().max_model_len, new_tokens=NEW_TOKENS)


@pytest.fixture(autouse=True)
def only_dry_and_xtc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "KINDS", (REPEATING,))


def prompts() -> Prompts:
    return Prompts(loaded().spec.vocab_size, loaded().eos_token_ids, 0)


@pytest.mark.parametrize("name", CASES)
def test_no_token_changes(name: str) -> None:
    """A case is equal only if what it is about took place: pages ran short, a prefix was found, and so on."""
    found = run_case(loaded(), replace(DEFAULT, **CASES[name]), scale(), prompts(), naive())
    assert found.verdict == "equal", (found.error, found.missing, [d.describe() for d in found.differences])


def test_both_have_an_effect_on_these_requests() -> None:
    requested = [a.request for r in rounds(Case(others=3), scale(), prompts()) for a in r.arrivals]
    for off in ({"dry_multiplier": 0.0}, {"xtc_probability": 0.0}):
        plain = [replace(r, params=replace(requests.params_of(r), **off)) for r in requested]
        assert [naive().answer(r, 0) for r in requested] != [naive().answer(r, 0) for r in plain]


def test_a_history_that_does_not_grow_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    case = replace(DEFAULT, others=3)
    assert run_case(loaded(), case, scale(), prompts(), naive()).verdict == "equal"  # naive() keeps the answers
    monkeypatch.setattr(Dry, "push", lambda self, token: None)
    assert run_case(loaded(), case, scale(), prompts(), naive()).differences
