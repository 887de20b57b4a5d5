"""Recorded steps against steps whose kernels Python starts one by one."""

from __future__ import annotations

from ridgeline.errors import RequestError
from ridgeline.lab.experiment import Experiment, Facts, Setup
from ridgeline.lab.judgement import Judgement, at_least
from ridgeline.lab.timing import middle, model, token_s

PROMPT, TOKENS = 8, 65
# A step with an operation that is not of the kernels is not recorded. Looking up one row in numpy takes microseconds.
APART = {"embedding": "numpy"}
FASTER = 1.2  # least gain in each repetition


def predict(setup: Setup) -> Facts:
    """Say that nothing but the start of kernels differs, so the gain has the same direction for every model."""
    return {"differs": "the start of kernels"}


def measure(setup: Setup) -> Facts:
    """Time the tokens of one sequence with recorded steps and with others, in turn."""
    length = PROMPT + TOKENS
    recorded = model(setup.model, setup.threads, 1, length)
    apart = model(setup.model, setup.threads, 1, length, ops=APART)
    times: list[list[float]] = [[], []]
    for i in range((5 if setup.quick else 15) + 1):
        for seconds, llm in zip(times, (recorded, apart), strict=True):
            seconds.append(token_s(llm, (setup.seed, i), 1, PROMPT, TOKENS))
    why = [stats.unrecorded for llm in (recorded, apart) if (stats := llm.stats()) is not None]
    if why[0] is not None:
        raise RequestError(f"--model {setup.model} has steps that are not recorded: {why[0]}")
    assert why[1] is not None, "both models are recorded"
    return {"recorded_s": times[0][1:], "apart_s": times[1][1:]}  # the first ones record the steps


def judge(predicted: Facts, measured: Facts) -> tuple[Judgement, ...]:
    """Judge the gain."""
    recorded, apart = middle(measured["recorded_s"])[0], middle(measured["apart_s"])[0]
    gain, spread = middle([b / a for a, b in zip(measured["recorded_s"], measured["apart_s"], strict=True)])
    return (
        at_least(
            40, gain, FASTER,
            f"a token takes {recorded * 1e3:.2f} ms from a recording and {apart * 1e3:.2f} ms where Python starts each "
            "kernel, on this CPU; a GPU, whose kernels start later, is needed for CUDA graphs",
            spread,
        ),
    )  # fmt: skip


EXPERIMENT = Experiment(
    "recorded", "Recorded steps", (40,), predict, measure, judge,
    "The kernels of a step are the same in both runs. Recorded, one call runs all of them; otherwise Python starts "
    "each, which takes microseconds every time. A small model has the most to gain.",
)  # fmt: skip
