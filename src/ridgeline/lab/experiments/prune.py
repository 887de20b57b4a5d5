"""Prune by importance: parts that give much on text are kept, against parts kept by chance or by their weights."""

from __future__ import annotations

from statistics import fmean
from typing import Any

from ridgeline.compress.prune import PruneOptions, parse_keep
from ridgeline.lab.changed import Changer
from ridgeline.lab.experiment import Experiment, Facts, Setup
from ridgeline.lab.judgement import Judgement, at_least

KEPT = ("mlp=0.5", "heads=0.5", "width=0.75")  # neurons, query heads and hidden numbers
SEEDS = 3  # of parts that are kept by chance
CLEAR = 1.2  # times the loss of importance that the best of random choices has to have


def predict(setup: Setup) -> Facts:
    """Name the order that the claim expects before any repair: importance loses least."""
    return {"order": ["activation", "random"], "kept": list(KEPT)}


def measure(setup: Setup) -> Facts:
    """Prune the model by importance, by norms of weights, and by chance; measure what each loses."""
    changer = Changer.open(setup, sequences=8 if setup.quick else 64, length=128 if setup.quick else 256)
    found: dict[str, Any] = {}
    for kept in KEPT:
        setup.on_part(f"prune: {kept}")
        aims = parse_keep(kept)
        models = {"activation": changer.pruned(aims, PruneOptions(seed=setup.seed))}
        models["weights"] = changer.pruned(aims, PruneOptions("weights", channels="importance", seed=setup.seed))
        for i in range(SEEDS):
            by_chance = PruneOptions("random", channels="importance", seed=setup.seed + i)
            models[f"random {i}"] = changer.pruned(aims, by_chance)
        found[kept] = changer.losses(models)
    return {"losses": found}


def judge(predicted: Facts, measured: Facts) -> tuple[Judgement, ...]:
    """Judge the order of importance and chance, at the ends of both intervals."""
    ratios, texts = [], []
    for kept, losses in measured["losses"].items():
        chance = [loss for name, loss in losses.items() if name.startswith("random")]
        best, own = min(chance), losses["activation"]
        mean = fmean(loss for loss, _ in chance)
        ratios.append((best[0] / own[0], (best[0] - best[1]) / (own[0] + own[1]), mean / own[0]))
        texts.append(f"{kept} {own[0]:.2f}, by weights {losses['weights'][0]:.2f}, by chance {mean:.2f}")
    ratio, low, mean = min(ratios, key=lambda r: r[1])
    return (
        at_least(
            30, ratio, CLEAR,
            f"loss by importance (KL, nats a token): {'; '.join(texts)}; what distillation restores is measured by "
            "`repair`",
            (low, mean),
        ),
    )  # fmt: skip


EXPERIMENT = Experiment(
    "prune",
    "Pruning by importance",
    (30,),
    predict,
    measure,
    judge,
    "The number is the loss of the best of three random choices over that of importance, for the part where it is "
    "least. Importance is the size of what a part gives on text, as in Minitron. Nothing is repaired.",
    timed=False,
)
