"""Diffusion over embeddings (Diffusion-LM): texts that are right as a whole, clamping to words, and control."""

from __future__ import annotations

from collections.abc import Mapping
from math import comb
from statistics import fmean
from typing import Any

import numpy as np

from ridgeline.lab.experiment import Experiment, Facts, Figure, Series, Setup
from ridgeline.lab.judgement import Judgement, at_least, only_if
from ridgeline.lab.kept import kept
from ridgeline.ops.devices import require_torch

WORDS, LENGTH, AT = (
    8,
    8,
    3,
)  # a text is eight of eight words in order; the aim is one of the last four words at position AT
SEEDS, DRAWN = 3, 256
CONTROLLED, RIGHT = 0.3, 0.5  # least gain of texts with the aim; least share of texts that are in order
MODES = {"free": (False, False), "clamped": (True, False), "guided": (False, True), "both": (True, True)}
Ints = np.ndarray[Any, np.dtype[np.int64]]


def _texts(rng: np.random.Generator, rows: int) -> Ints:
    return np.sort(rng.integers(0, WORDS, (rows, LENGTH)), axis=1)


def _has_aim(ids: Ints) -> np.ndarray[Any, np.dtype[np.bool_]]:
    return ids[:, AT] >= WORDS // 2


def predict(setup: Setup) -> Facts:
    """Count what chance gives: texts in order among independent words, and the aim among texts in order."""
    in_order = comb(WORDS + LENGTH - 1, LENGTH) / WORDS**LENGTH
    has_aim = sum(comb(LENGTH, n) for n in range(AT + 1)) / 2**LENGTH
    return {"in_order": in_order, "has_aim": has_aim}


def measure(setup: Setup) -> Facts:
    """Train a denoiser of embeddings with three seeds, and draw texts, with clamping and guidance and without."""
    found = []
    for seed in range(setup.seed, setup.seed + SEEDS):
        setup.on_part(f"embeddings: seed {seed}")
        found.append(_shares(seed))
    return {"shares": {name: {key: [one[name][key] for one in found] for key in found[0][name]} for name in MODES}}


def _shares(seed: int) -> Mapping[str, Mapping[str, float]]:
    """Return what `drawn` finds for a seed. A result is kept by its content. Raises RequestError without torch."""
    require_torch("a model that is trained in the lab")
    from ridgeline.train.embedding_noise import CHOICES

    return kept(None, {"texts": [WORDS, LENGTH, AT], "seed": seed, "drawn": DRAWN, **CHOICES}, lambda: drawn(seed))


def drawn(seed: int, **options: Any) -> dict[str, dict[str, float]]:
    """Train a denoiser, and return the shares of texts in order, with the aim, and different ones, by mode.

    options: as of EmbeddingDiffusion.
    """
    from ridgeline.train.embedding_noise import EmbeddingDiffusion

    model = EmbeddingDiffusion(_texts, _has_aim, WORDS, LENGTH, seed, **options)
    found = {name: model.draw(DRAWN, seed, clamped=own[0], guided=own[1]) for name, own in MODES.items()}
    return {
        name: {
            "in_order": float((np.diff(ids, axis=1) >= 0).all(1).mean()),
            "has_aim": float(_has_aim(ids).mean()),
            "different": len(np.unique(ids, axis=0)) / DRAWN,
        }
        for name, ids in found.items()
    }


def judge(predicted: Facts, measured: Facts) -> tuple[Judgement, ...]:
    """Judge what guidance gains; texts have to be in order in each way of drawing them."""
    shares = measured["shares"]
    gains = [a - b for a, b in zip(shares["guided"]["has_aim"], shares["free"]["has_aim"], strict=True)]
    in_order, has_aim, different = (
        {name: f"{fmean(own[key]):.0%}" for name, own in shares.items()} for key in ("in_order", "has_aim", "different")
    )
    return (
        only_if(
            at_least(
                24, fmean(gains), CONTROLLED,
                f"of texts of {LENGTH} words that should be in order, {in_order['free']} are (independent words: "
                f"{predicted['in_order']:.1%}), and {in_order['clamped']} with each step clamped to words; "
                f"{different['free']} and {different['clamped']} are different from all others; a classifier guides "
                f"{has_aim['guided']} to its aim ({has_aim['both']} if clamped), in place of {has_aim['free']}, where "
                f"{predicted['has_aim']:.0%} of the training texts have it; a text takes 200 passes in place of "
                f"{LENGTH} steps",
                (min(gains), max(gains)),
            ),
            all(least >= RIGHT for own in shares.values() for least in own["in_order"]),
        ),
    )  # fmt: skip


def figures(predicted: Facts, measured: Facts) -> tuple[Figure, ...]:
    """Return the shares of each way of drawing texts."""
    points = [
        Series(name, [(fmean(own["has_aim"]), fmean(own["in_order"]))], measured=True)
        for name, own in measured["shares"].items()
    ]
    return (
        Figure(
            "Texts in order over texts with the aim", "share with the aim", "share in order", tuple(points), log=False
        ),
    )


EXPERIMENT = Experiment(
    "embeddings", "Diffusion over embeddings", (24,), predict, measure, judge,
    "A small transformer is trained to take noise from the embeddings of eight words that are in order, and draws such "
    "texts from noise alone. The number is how many more draws have an aim, which a classifier of noisy texts follows "
    "by its gradient. Results are kept in the cache folder by their content.", figures,
    timed=False,
)  # fmt: skip
