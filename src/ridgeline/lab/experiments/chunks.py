"""Long prompts beside running answers: the longest gap between two tokens, with and without chunks of the prompt."""

from __future__ import annotations

from statistics import median
from typing import Any

from ridgeline.catalog.models import find_model
from ridgeline.errors import RequestError
from ridgeline.lab.experiment import Experiment, Facts, Figure, Series, Setup
from ridgeline.lab.judgement import Judgement, at_least, only_if
from ridgeline.lab.steps import gaps_s
from ridgeline.lab.timing import middle
from ridgeline.plan.planner import Deployment, Planner
from ridgeline.runtime.load import LoadOptions, load_model

PROMPT, CHUNK, DECODES = 896, 64, 4  # tokens of the long prompt, and of a step with chunks; answers that run meanwhile
MOST = {"whole": PROMPT + DECODES, "chunks": CHUNK}  # tokens of a step
TRIES = 3  # of equal steps, of which the fastest counts: a longest gap would otherwise be that of another program
LEAST = PROMPT + 128  # tokens of the model's context
SHORTER = 3.0  # times: a step of 64 tokens has a fourteenth of the arithmetic, and also reads all weights


def _parts(prompt: int, chunk: int) -> list[int]:
    """Return the tokens of each step until the prompt is done: answers that run take one each, the prompt the rest."""
    parts = []
    while prompt > 0:
        parts.append(min(chunk, prompt + DECODES))
        prompt -= chunk - DECODES
    return parts


def predict(setup: Setup) -> Facts:
    """Count the steps of the prompt, and let the planner say how long one takes."""
    planner = Planner(Deployment(find_model(setup.model).spec, setup.machine))
    whole, chunk = (planner.decode(1, PROMPT, n).seconds for n in (PROMPT, CHUNK))
    return {"steps": {"whole": 1, "chunks": len(_parts(PROMPT, CHUNK))}, "shorter": whole / chunk}


def measure(setup: Setup) -> Facts:
    """Time the steps of answers that run while a long prompt arrives, with and without chunks, in turn.

    Raises RequestError for a model whose context is too short.
    """
    loaded = load_model(setup.model, LoadOptions(device="cpu", threads=setup.threads))
    if loaded.max_model_len < LEAST:
        raise RequestError(f"--model {setup.model} has a context of {loaded.max_model_len} tokens; {LEAST} are needed")
    found: dict[str, Any] = {"whole": [], "chunks": [], "alone": []}
    for i in range(3 if setup.quick else 9):
        setup.on_part(f"chunks: prompt {i + 1}")
        runs = [[gaps_s(loaded, PROMPT, most, DECODES, setup.seed + i) for most in MOST.values()] for _ in range(TRIES)]
        for name, tries in zip(MOST, zip(*runs, strict=True), strict=True):
            found[name].append([min(same) for same in zip(*(gaps for gaps, _ in tries), strict=True)])
            found["alone"].append(min(alone for _, alone in tries))
    return found


def judge(predicted: Facts, measured: Facts) -> tuple[Judgement, ...]:
    """Judge how much shorter the longest gap is with chunks, where the steps are as many as counted."""
    whole, chunks = ([max(gaps) for gaps in measured[name]] for name in ("whole", "chunks"))
    gain, spread = middle([a / b for a, b in zip(whole, chunks, strict=True)])
    first = [median(map(sum, measured[name])) for name in ("whole", "chunks")]
    counted = all(len(gaps) == predicted["steps"][n] for n in ("whole", "chunks") for gaps in measured[n])
    return (
        only_if(
            at_least(
                47, gain, SHORTER,
                f"while a prompt of {PROMPT} tokens is computed, {DECODES} answers wait {median(whole) * 1e3:.1f} ms "
                f"for a token without chunks, at most {median(chunks) * 1e3:.1f} ms with chunks of {CHUNK} tokens a "
                f"step, and {median(measured['alone']) * 1e3:.1f} ms without the prompt; the prompt's own token comes "
                f"after {first[0] * 1e3:.0f} ms and {first[1] * 1e3:.0f} ms",
                spread,
            ),
            counted,
        ),
    )  # fmt: skip


def figures(predicted: Facts, measured: Facts) -> tuple[Figure, ...]:
    """Return the gaps of one run, step by step."""
    curves = tuple(
        Series(name, [(float(i + 1), s * 1e3) for i, s in enumerate(measured[name][0])], measured=True)
        for name in ("chunks", "whole")
    )
    return (Figure("Gap between two tokens while a long prompt arrives", "step", "ms", curves, log=False),)


EXPERIMENT = Experiment(
    "chunks", "A long prompt beside running answers", (47,), predict, measure, judge,
    "A step that computes a whole prompt holds up every answer that runs. In chunks the prompt takes more steps, each "
    "of which gives every answer its token. The price is a later first token of the long prompt.", figures,
)  # fmt: skip
