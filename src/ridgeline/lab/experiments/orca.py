"""Continuous batching against static batches: the harmonic number, for answers of geometric lengths."""

from __future__ import annotations

import numpy as np

from ridgeline.catalog.machines import hardware
from ridgeline.catalog.models import find_model
from ridgeline.lab.experiment import Experiment, Facts, Figure, Series, Setup
from ridgeline.lab.judgement import Judgement, within
from ridgeline.plan.planner import Deployment
from ridgeline.sim import LinearCost, Request, Workload, settings, simulate

BATCHES, MEAN = (2, 4, 8, 16), 64  # sequences at once, mean tokens of an answer
NEAR = 0.06  # largest relative distance from the harmonic number


def predict(setup: Setup) -> Facts:
    """The longest of B geometric answers is H(B) times the mean, and a static batch waits for it."""
    return {"gains": {str(b): sum(1 / k for k in range(1, b + 1)) for b in BATCHES}}


def measure(setup: Setup) -> Facts:
    """Run the engine's own scheduler on a virtual clock where each step takes a second, and count its steps."""
    count = 2000 if setup.quick else 8000
    deployment = Deployment(find_model("pocket").spec, hardware("h100"))
    gains = {}
    for batch in BATCHES:
        setup.on_part(f"orca: batches of {batch}")
        lengths = np.random.default_rng((setup.seed, batch)).geometric(1 / MEAN, count - count % batch)
        static = sum(int(part.max()) for part in lengths.reshape(-1, batch))
        work = Workload([Request(0, 1, int(n)) for n in lengths], clients=batch)
        found = simulate(work, settings(deployment, max_num_seqs=batch), LinearCost((1,), (1.0,)))
        gains[str(batch)] = static / found.report.steps
    return {"gains": gains, "requests": count}


def judge(predicted: Facts, measured: Facts) -> tuple[Judgement, ...]:
    """Judge the largest distance from the harmonic number."""
    worst = max(abs(measured["gains"][b] / gain - 1) for b, gain in predicted["gains"].items())
    seen = ", ".join(f"{gain:.2f} times at {b}" for b, gain in measured["gains"].items())
    return (within(35, worst, 0, NEAR, f"static batches take {seen}, within {worst:.1%} of the harmonic number"),)


def figures(predicted: Facts, measured: Facts) -> tuple[Figure, ...]:
    """Return the gain over the batch."""
    curves = [Series(name, [(float(b), g) for b, g in facts["gains"].items()], name == "measured")
              for name, facts in (("harmonic number", predicted), ("measured", measured))]  # fmt: skip
    return (
        Figure("Steps of static batches over those of continuous ones", "sequences at once", "ratio", tuple(curves)),
    )


EXPERIMENT = Experiment(
    "orca",
    "Continuous batching against static batches",
    (35,),
    predict,
    measure,
    judge,
    "The scheduler that serves requests runs on a virtual clock, so the result is the same on every machine. The gain "
    "comes from lengths alone: a static batch waits for its longest answer.",
    figures,
    timed=False,
)
