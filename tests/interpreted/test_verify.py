"""`ridgeline verify` over the kernels: each way to serve requests gives the tokens of naive sampling.

Prompts and answers are shorter than those of the command, because the interpreter is slow.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from interpreted.engines import load, on_tape
from interpreted.guarded import guarded
from interpreted.tape import taped
from interpreted.tiny import EXPERTS, FULL, LATENT, LOCAL, MAMBA2, one, pair
from ridgeline.runtime.load import LoadedModel
from ridgeline.verify import matrix
from ridgeline.verify.baseline import Baseline
from ridgeline.verify.matrix import Case, Scale, cases
from ridgeline.verify.report import CaseResult
from ridgeline.verify.requests import Prompts
from ridgeline.verify.run import run_case, scale_of
from shares import daily

LENGTH, NEW_TOKENS = 64, 8
MODELS = {
    "attention": one(replace(LOCAL, window=12)), "latents": one(LATENT), "experts": one(FULL, EXPERTS),
    "hybrid": pair(MAMBA2, FULL, None, None),
}  # fmt: skip

EVERY = [(name, axis) for name in MODELS for axis in ("default", *matrix.AXES, "window")]
# Batches, preemption, drafts and steps in flight are compared each day in test_engine.py.
TODAY = [("attention", "window")]


@pytest.fixture(autouse=True)
def short_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make prompts a little longer than a page."""
    monkeypatch.setattr(matrix, "PROMPT", 20)


@cache
def loaded(name: str) -> tuple[LoadedModel, Baseline]:
    """Return a model on the kernels, and its answers by naive sampling."""
    model, _ = on_tape(MODELS[name].spec(), LENGTH)
    return model, Baseline(model)


def scale(name: str, *, quick: bool) -> Scale:
    """Return the limits of the matrix of a model."""
    return scale_of(loaded(name)[0], None, quick, NEW_TOKENS)


def run(name: str, case: Case, model: LoadedModel | None = None) -> CaseResult:
    """Run a case. model: one with a planted bug; None: the right one."""
    right, baseline = loaded(name)
    return run_case(model or right, case, scale(name, quick=False), Prompts(200, (), 0), baseline)


@pytest.mark.parametrize(("name", "axis"), daily(EVERY, TODAY, slow=False))
def test_answers_are_those_of_naive_sampling(name: str, axis: str) -> None:
    """The values of an axis in a quick run have an effect, and change no token."""
    for case in cases(scale(name, quick=True), 0):
        if case.axis == axis and not case.impossible:
            found = run(name, case)
            seen = found.error, found.missing, [difference.describe() for difference in found.differences]
            assert found.verdict == "equal", (case.value, *seen)


COMBINED = {(name, i) for name in MODELS for i in range(matrix.NUM_COMBINATIONS)}
COMBINED -= {("attention", 0)}  # with these short prompts, no other sequence runs while one is preempted


@pytest.mark.nightly
@pytest.mark.parametrize(("name", "number"), sorted(COMBINED))
def test_combinations_of_axes_change_no_token(name: str, number: int) -> None:
    case = [case for case in cases(scale(name, quick=False), 0) if case.axis == "combined"][number]
    found = run(name, case)
    seen = found.error, found.missing, [difference.describe() for difference in found.differences]
    assert found.verdict == "equal", (case.value, *seen)


def with_bug(name: str, kernel: str, **changes: Callable[[Any], Any]) -> LoadedModel:
    """Return a model one of whose kernels gets other arguments.

    changes: new values by name, from the right ones, where a launch has them.
    """

    def start(found: Any, grid: tuple[int, ...], compiled: Any, **arguments: Any) -> None:
        if found.fn.__name__ == kernel:
            given = {key: arguments[key] for key in changes if arguments[key] is not None}
            arguments |= {key: changes[key](value) for key, value in given.items()}
        guarded(found, grid, compiled, **arguments)

    table, _ = taped(start)
    return load(MODELS[name].spec(), table, LENGTH)


BUGS = {
    "a query reads a key too many": ("latents", "attend", {"starts": lambda x: x + 1}),
    "a window is a key too long": ("attention", "attend", {"RULE": lambda rule: (rule[0] + 1, *rule[1:])}),
    "a new state is not empty": ("hybrid", "ssd_step", {"fresh": lambda x: x * 0}),
    "a state is written to the page of another sequence": ("hybrid", "ssd_step", {"write": lambda x: x.flip(0)}),
    "keys are written to other slots": ("experts", "dense_product", {"slots": lambda x: x ^ 1}),
}


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # poisoned keys are large
@pytest.mark.parametrize("bug", daily(BUGS, ["a window is a key too long", "a new state is not empty"], slow=False))
def test_a_wrong_kernel_is_found(bug: str) -> None:
    name, kernel, changes = BUGS[bug]
    case = next(case for case in cases(scale(name, quick=True), 0) if case.axis == "batch")
    # Poisoned memory may also end the run with an error, which `verify` reports as a failure, too.
    assert run(name, case, with_bug(name, kernel, **changes)).verdict in ("DIFFERENT", "error")
