"""Altered configs beside transformers: a sample of `python -m oracle.fuzz` in the slow tests, all of it at night."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from oracle.families import CASES
from oracle.flips import Flip, alterations, flips
from oracle.fuzz import BAD, BOTH, DIFFERENT, EQUAL, LENIENT, UNEXPLAINED, UNSERVED, Subject, run
from oracle.unserved import LENIENT as LENIENT_REASONS
from oracle.unserved import UNSERVED as UNSERVED_REASONS
from ridgeline.archs import FAMILIES, spec_from_config
from shares import daily

STEP = 29  # the sample takes every 29th flip; a prime, so that it is not in step with the values of a field
# A case of every family that has one: the last one, which has the most fields away from their defaults.
ONE_EACH = list({case.model_type: name for name, case in CASES.items()}.values())


def failures(name: str, step: int = 1) -> tuple[list[str], Counter[str]]:
    """Return the failures among the flips of a case, and how often each outcome occurs."""
    torch.set_num_threads(1)
    wrong, count, seen = [], Counter[str](), 0

    def chosen(flip: Flip) -> bool:
        nonlocal seen
        seen += 1
        return seen % step == 0

    for flip, verdict in run(name, chosen):
        count[verdict.outcome] += 1
        if verdict.outcome in BAD:
            wrong.append(f"{flip.label}: {verdict.outcome}: {verdict.detail}")
    return wrong, count


@pytest.mark.parametrize("name", daily(ONE_EACH, ONE_EACH[::4]))
@pytest.mark.filterwarnings("ignore")  # transformers warns about the values
def test_a_sample_of_altered_configs(name: str) -> None:
    wrong, count = failures(name, STEP)
    assert not wrong, "\n".join(wrong)
    assert count[EQUAL]
    assert count[BOTH]


@pytest.mark.nightly
@pytest.mark.parametrize("name", CASES)
@pytest.mark.filterwarnings("ignore")
def test_every_altered_config(name: str) -> None:
    wrong, count = failures(name)
    assert not wrong, "\n".join(wrong)
    assert sum(count.values()) == len(list(flips(Subject(CASES[name]).config, scalings=True)))
    print(f"{name}: {dict(count)}")


def test_the_fuzz_sees_a_field_that_is_misread() -> None:
    """Check the judge itself: it must find a spec that differs from the config, and an error that names no field."""
    subject = Subject(CASES["qwen2_window"])
    flip = Flip("sliding_window", "25", subject.config)
    assert subject.judge(flip).outcome == EQUAL
    (window,) = (f for f in flips(subject.config) if f.label == "sliding_window=25")
    model, theirs = subject.run_theirs(window.config, None)
    ours = subject.run_theirs(subject.config, None)[1]
    assert subject.compared(window, spec_from_config(subject.config), model, theirs, ours).outcome == DIFFERENT
    assert subject.refused(window, "something is wrong", theirs).outcome == UNEXPLAINED
    assert subject.refused(window, "sliding_window is 25, not int", theirs).outcome == UNSERVED
    assert subject.refused(window, "sliding_window is odd", "TypeError").outcome == BOTH


@pytest.mark.parametrize("value", [True, 3, 1.5, "silu", [1, 2], {"a": 1}, None])
def test_alterations_are_other_values_of_every_kind(value: object) -> None:
    found = list(alterations(value))
    kinds = {type(x) for x in found}
    assert len(kinds) >= 5
    assert None in found


def test_every_family_of_transformers_is_altered() -> None:
    elsewhere = {"minimax_text_01", "minimax_m1", "sdar", "llada2_moe", "llada", "Dream", "diffusion_gemma"}
    assert {CASES[name].model_type for name in ONE_EACH} == set(FAMILIES) - elsewhere


def test_reasons_are_sentences() -> None:
    for _, why in (*UNSERVED_REASONS, *LENIENT_REASONS):
        assert why.endswith(".")
        assert len(why.split()) >= 5
    assert LENIENT not in BAD
