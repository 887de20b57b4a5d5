"""A faster architecture from scratch, and from the original's weights with distillation, on equal tokens."""

from __future__ import annotations

from statistics import median
from typing import Any

from ridgeline.catalog.models import find_model
from ridgeline.compress.folder import open_original
from ridgeline.lab.experiment import Experiment, Facts, Setup
from ridgeline.lab.judgement import Judgement, at_least, only_if
from ridgeline.lab.repair import repaired, student
from ridgeline.plan.planner import Deployment, Planner

SEEDS, QUICK_TOKENS, TOKENS = 3, 8192, 32_768  # 10 and 40 core-seconds each for the built-in model
LEARNS = 1.2  # times by which perplexity from scratch has to fall: random weights learn frequent words at once
CHEAPER = 2.0  # times the perplexity of repaired weights that scratch has to have after equal tokens
CONTEXT = 1024  # tokens at which the planner compares speeds


def predict(setup: Setup) -> Facts:
    """Compute by the planner how much faster a token is with half of the key heads."""
    changed = student(open_original(setup.model, setup.threads), "heads", drawn=False).spec
    specs = find_model(setup.model).spec, changed
    context = min(CONTEXT, changed.max_position_embeddings)
    before, after = (Planner(Deployment(spec, setup.machine)).decode(64, context).seconds for spec in specs)
    return {"faster": before / after}


def measure(setup: Setup) -> Facts:
    """Train the student from both starts with three seeds each, on as many tokens."""
    tokens = QUICK_TOKENS if setup.quick else TOKENS
    found: dict[str, Any] = {"tokens": tokens}
    for name, stages, drawn in (("repaired", "logits", False), ("scratch", "tokens", True)):
        runs = []
        for seed in range(setup.seed, setup.seed + SEEDS):
            setup.on_part(f"repair: {name}, seed {seed}")
            runs.append(repaired(setup, "heads", tokens, seed, stages, drawn=drawn))
        found[name] = {key: [run[key] for run in runs] for key in ("kl", "perplexity")}
        found["original"] = runs[0]["original"]
    return found


def judge(predicted: Facts, measured: Facts) -> tuple[Judgement, ...]:
    """Judge what scratch learns, and what the original's weights save."""
    scratch, repair = (measured[name]["perplexity"] for name in ("scratch", "repaired"))
    learned = [before / after for before, after in scratch]
    saved = [own[1] / other[1] for own, other in zip(scratch, repair, strict=True)]
    tokens, original = measured["tokens"], measured["original"]
    return (
        only_if(
            at_least(
                44, median(learned), LEARNS,
                f"with half of the key heads and random weights, {tokens:,} tokens bring perplexity from "
                f"{median(b for b, _ in scratch):,.0f} to {median(a for _, a in scratch):,.0f}, and the original has "
                f"{original:.1f}; a token of 64 sequences is {predicted['faster']:.2f} times as fast by the planner",
                (min(learned), max(learned)),
            ),
            predicted["faster"] > 1,
        ),
        at_least(
            45, median(saved), CHEAPER,
            f"from the original's weights, distillation on as many tokens brings it from "
            f"{median(b for b, _ in repair):.1f} to {median(a for _, a in repair):.1f}, a KL of "
            f"{median(k for _, k in measured['repaired']['kl']):.2f} nats a token",
            (min(saved), max(saved)),
        ),
    )  # fmt: skip


EXPERIMENT = Experiment(
    "repair",
    "A faster architecture: from scratch, and from the original's weights",
    (44, 45),
    predict,
    measure,
    judge,
    "Both students have the same architecture, texts, tokens and rate. The number of claim 44 is perplexity before "
    "over after, that of claim 45 perplexity from scratch over that of the repaired weights. Results are kept in the "
    "cache folder by their content.",
    timed=False,
)
