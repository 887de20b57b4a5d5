"""Speculative sampling: its distribution by chi-square, its speed-up by the formula, and the cost of checking."""

from __future__ import annotations

from statistics import median
from typing import Any

import numpy as np

from ridgeline.catalog.machines import hardware
from ridgeline.catalog.models import find_model
from ridgeline.lab.experiment import Experiment, Facts, Figure, Series, Setup
from ridgeline.lab.judgement import Judgement, at_most, only_if, within
from ridgeline.lab.steps import verification_s
from ridgeline.lab.toy import Sampler, deviations, toy
from ridgeline.plan.planner import Deployment, Planner
from ridgeline.plan.speculation import DRAFT_COST, Speculation
from ridgeline.runtime.load import LoadOptions, load_model

DRAFTS, DEPTHS, CONTEXT = 4, (1, 2, 4, 8), 128
BATCHES, TOKENS, ASSUMED = (
    (1, 4, 16, 64, 256),
    512,
    0.7,
)  # of the curve over the batch; the acceptance is that of T5-small
LIMIT = 4.0  # standard deviations: a right sampler passes them once in 30,000 tries, and the bug by far
NEAR = 0.04  # of the formula: five standard errors of the mean over the verifications of --quick
CHEAPER = 0.8  # of 1 + DRAFTS steps: checking has to cost clearly less than generating as many tokens


def predict(setup: Setup) -> Facts:
    """Compute tokens by the formula, and by the planner the cost of checking here and the speed-up over the batch."""
    own = Planner(Deployment(find_model(setup.model).spec, setup.machine))
    large = Planner(Deployment(find_model("llama-2-7b").spec, hardware("h100")))
    p, q = toy(setup.seed)
    a = float(np.minimum(p[0], q[0]).sum())
    tokens = Speculation(ASSUMED, DRAFTS).tokens
    return {
        "acceptance": a,
        "tokens": {str(g): (1 - a ** (g + 1)) / (1 - a) for g in DEPTHS},
        "check": _ratio(own, 1, CONTEXT),
        "speed_ups": {str(b): tokens / (DRAFTS * DRAFT_COST + _ratio(large, b, TOKENS)) for b in BATCHES},
        "formula": tokens / (DRAFTS * DRAFT_COST + 1),
    }


def _ratio(planner: Planner, batch: int, context: int) -> float:
    """Return the time of a step that verifies DRAFTS drafts, in steps of one token."""
    return planner.decode(batch, context, 1 + DRAFTS).seconds / planner.decode(batch, context).seconds


def measure(setup: Setup) -> Facts:
    """Draw answers with the engine's rule, with and without the bug; count tokens of verifications; time steps."""
    tries, answers, verifications = (3, 3000, 4000) if setup.quick else (10, 10_000, 20_000)
    p, _ = toy(setup.seed)
    found: dict[str, Any] = {}
    for name, with_bug in (("exact", False), ("bug", True)):
        setup.on_part(f"speculative: answers, {name}")
        samplers = [Sampler(setup.seed, number, with_bug=with_bug) for number in range(tries)]
        found[name] = [deviations(sampler.counts(answers), p) for sampler in samplers]
    setup.on_part("speculative: tokens of a verification")
    sampler = Sampler(setup.seed, tries)
    found["tokens"] = {
        str(g): sum(len(sampler.verify(0, g, moves=False)) for _ in range(verifications)) / verifications
        for g in DEPTHS
    }
    setup.on_part("speculative: steps")
    loaded = load_model(setup.model, LoadOptions(device="cpu", threads=setup.threads))
    steps = [verification_s(loaded, CONTEXT, DRAFTS, 20) for _ in range(3)]
    return found | {"check": [median(checks) / median(plain) for plain, checks in steps]}


def judge(predicted: Facts, measured: Facts) -> tuple[Judgement, ...]:
    """Judge the cost of checking where the sample is exact and the bug is seen; and the formula by the toy."""
    worst, caught, ratios = max(measured["exact"]), min(measured["bug"]), measured["check"]
    share = [ratio / (1 + DRAFTS) for ratio in ratios]
    off = max(abs(measured["tokens"][g] / wanted - 1) for g, wanted in predicted["tokens"].items())
    curve = predicted["speed_ups"]
    (low, first), (high, last) = next(iter(curve.items())), list(curve.items())[-1]
    checking = at_most(
        31, median(share), CHEAPER,
        f"a step that checks {DRAFTS} drafts takes {median(ratios):.2f} steps of one token, and the planner says "
        f"{predicted['check']:.2f}; answers are at most {worst:.1f} deviations from the model's law by chi-square, and "
        f"with the classic bug at least {caught:.1f}",
        (min(share), max(share)),
    )  # fmt: skip
    return (
        only_if(checking, worst <= LIMIT <= caught),
        within(
            32, off, 0, NEAR,
            f"verifications of independent drafts give the formula's tokens within {off:.1%}; for a Llama 2 7B on an "
            f"H100 with an acceptance of {ASSUMED:g} the formula says {predicted['formula']:.2f} times, and the "
            f"planner {first:.2f} at a batch of {low} and {last:.2f} at {high}, where checking is no longer free",
        ),
    )  # fmt: skip


def figures(predicted: Facts, measured: Facts) -> tuple[Figure, ...]:
    """Return the tokens over the drafts, and the speed-up over the batch."""
    tokens = [
        Series(name, [(float(g), t) for g, t in facts["tokens"].items()], name == "measured")
        for name, facts in (("formula", predicted), ("measured", measured))
    ]
    curve = [(float(b), s) for b, s in predicted["speed_ups"].items()]
    flat = [(b, predicted["formula"]) for b, _ in curve]
    return (
        Figure("Tokens of a verification", "drafts", "tokens", tuple(tokens), log=False),
        Figure(
            "Speed-up of a Llama 2 7B on an H100 with four drafts", "sequences at once", "times",
            (Series("planner", curve, False), Series("formula", flat, False)),
        ),
    )  # fmt: skip


EXPERIMENT = Experiment(
    "speculative", "Speculative sampling", (31, 32), predict, measure, judge,
    "The engine's own rule verifies drafts of a toy with five tokens, whose law is known. The formula leaves out that "
    "a step with more tokens may take longer. So the gain ends where the batch makes steps compute-bound.", figures,
)  # fmt: skip
