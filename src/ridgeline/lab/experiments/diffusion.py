"""Diffusion language models by plan: all tokens in parallel, for one answer and for many."""

from __future__ import annotations

from ridgeline.catalog.machines import hardware
from ridgeline.catalog.models import find_model
from ridgeline.lab.experiment import Experiment, Facts, Figure, Series, Setup
from ridgeline.lab.judgement import Judgement, at_least, only_if, untried
from ridgeline.plan.denoise import denoise
from ridgeline.plan.planner import Deployment, Load, Planner

MODEL, MACHINE, PROMPT, ANSWER = "llama-3.1-8b", "h100", 128, 128
BATCHES, PASSES = (1, 8, 64, 256), (8, 16, 32, 64, 128)
FEW = 16  # passes of an answer of 128 tokens: 8 tokens a pass, as decoders with a threshold of confidence report


def predict(setup: Setup) -> Facts:
    """Compute by the roofline alone: a pass reads the weights once, as a step of a causal model does."""
    return {"gain_of_one_answer": ANSWER / FEW}


def measure(setup: Setup) -> Facts:
    """Plan the same sizes as a causal model and as a denoiser, over passes and batches."""
    planner = Planner(Deployment(find_model(MODEL).spec, hardware(MACHINE)))
    causal = {b: _causal_s(planner, b) for b in BATCHES}
    return {
        "gains": {
            str(p): {str(b): causal[b] / denoise(planner, Load(b, PROMPT, ANSWER), p).latency_s for b in BATCHES}
            for p in PASSES
        }
    }


def _causal_s(planner: Planner, batch: int) -> float:
    """Return the seconds of `batch` answers at once: their prompts together, and then a token each in every step."""
    load = Load(batch, PROMPT, ANSWER)
    return planner.decode(batch, PROMPT, PROMPT).seconds + (ANSWER - 1) * planner.tpot_s(load)


def judge(predicted: Facts, measured: Facts) -> tuple[Judgement, ...]:
    """Judge the gain of few passes for one answer; many answers at once have to be named where they lose."""
    few = measured["gains"][str(FEW)]
    (one, gain), *_, (most, last) = few.items()
    slow = measured["gains"][str(PASSES[-1])][one]
    return (
        only_if(
            at_least(
                23, gain, 1.0,
                f"by plan, a denoiser with {FEW} passes takes {1 / gain:.2f} of the time of a causal model of its size "
                f"for one answer of {ANSWER} tokens, and {1 / last:.1f} times its time for {most} at once; with a pass "
                f"for each token it gains {slow:.2f} times; which quality the passes give is not tried",
            ),
            slow <= gain,
        ),
        untried(
            24,
            "it needs a trained denoiser of embeddings, clamping, a classifier that guides it, and an engine that runs "
            "it; Ridgeline plans for denoisers and runs none",
        ),
    )  # fmt: skip


def figures(predicted: Facts, measured: Facts) -> tuple[Figure, ...]:
    """Return the gain over the batch, for each number of passes."""
    curves = [
        Series(f"{passes} passes", [(float(b), g) for b, g in gains.items()], measured=False)
        for passes, gains in measured["gains"].items()
    ]
    return (
        Figure(
            f"Speed of a denoiser over that of a causal model, {ANSWER} tokens on an H100", "answers at once", "times",
            tuple(curves),
        ),
    )  # fmt: skip


EXPERIMENT = Experiment(
    "diffusion",
    "Diffusion language models, by plan",
    (23, 24),
    predict,
    measure,
    judge,
    "A pass over all positions reads the weights once, as a step of one token does, but computes all positions again. "
    "So few passes gain much while memory limits a step, and lose once a batch makes steps compute-bound.",
    figures,
    timed=False,
)
