"""Medusa heads and an EAGLE head, trained for a minute each: how many tokens a verification gives."""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from ridgeline.lab.experiment import Experiment, Facts, Setup, Untried
from ridgeline.lab.judgement import Judgement, at_least, untried
from ridgeline.lab.kept import kept
from ridgeline.lab.texts import texts
from ridgeline.ops.devices import require_torch

KINDS: tuple[Literal["medusa", "eagle", "draft"], ...] = ("medusa", "eagle", "draft")
SEEDS, TOKENS, CONTINUED, DEPTH = 3, 60_000, 30_000, 4  # 30 to 55 core-seconds a head of the built-in model
TRAINED = 1.05  # tokens a verification, below which a draft is not trained enough to say anything
TWO = 0.005  # share of positions at which two drafts are right: chance has one in millions
BETTER = 0.0  # tokens a verification that EAGLE has to give more than a draft on tokens
MINUTES = "15 minutes and more"


def predict(setup: Setup) -> Facts:
    """Name what the papers expect after long training: more than one token, and EAGLE before a draft on tokens."""
    return {"order": ["eagle", "draft"], "without_drafts": 1.0}


def measure(setup: Setup) -> Facts:
    """Train each kind of draft on equal tokens with three seeds. Raises Untried for --quick, which has no time."""
    if setup.quick:
        raise Untried(
            "heads are trained for 9 x 30 to 55 core-seconds; run it without --quick, or train one for long: ridgeline "
            f"train --draft-for {setup.model} --kind eagle --data FILES --out HEADS"
        )
    require_torch("a head that is trained in the lab")
    found: dict[str, Any] = {kind: [] for kind in KINDS}
    for seed in range(setup.seed, setup.seed + SEEDS):
        for kind in KINDS:
            setup.on_part(f"drafts: {kind}, seed {seed}")
            facts = {"kind": kind, "tokens": TOKENS, "continued": CONTINUED, "seed": seed, "depth": DEPTH, "format": 1}
            found[kind].append(kept(setup.model, facts, partial(_train, setup, kind, seed)))
    return found


def _train(setup: Setup, kind: Literal["medusa", "eagle", "draft"], seed: int) -> dict[str, Any]:
    from ridgeline.train import Corpus
    from ridgeline.train.drafts import DraftOptions, train_draft

    options = DraftOptions(
        kind=kind, train_tokens=TOKENS, continuation_tokens=CONTINUED, output_len=64, batch_tokens=1024, depth=DEPTH,
        warmup_steps=5, held_out=0.2, held_out_prompts=60, seed=seed,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        quality = train_draft(setup.model, Corpus.from_paths(texts(quick=False)), Path(folder) / kind, options)
    return {"tokens": quality.acceptance.tokens_per_verification.value, "shares": list(quality.shares)}


def judge(predicted: Facts, measured: Facts) -> tuple[Judgement, ...]:
    """Judge whether heads give more than a token, and whether EAGLE gives more than a draft on tokens."""
    tokens = {kind: [run["tokens"] for run in measured[kind]] for kind in KINDS}
    mean = {kind: fmean(found) for kind, found in tokens.items()}
    gains = [a - b for a, b in zip(tokens["eagle"], tokens["draft"], strict=True)]
    second = [run["shares"][1] for run in measured["medusa"]]
    few = f"it needs longer training: after a minute, {{}} a verification; docs/speculation.md has heads of {MINUTES}"
    medusa = at_least(
        33, fmean(second), TWO,
        f"after a minute of training, Medusa's heads give {mean['medusa']:.3f} tokens a verification, and the first "
        f"two are right at {fmean(second):.1%} of positions",
        (min(second), max(second)),
    )  # fmt: skip
    eagle = at_least(
        34, fmean(gains), BETTER,
        f"on equal tokens, a head of EAGLE-1 gives {mean['eagle']:.3f} tokens a verification, and a draft model on "
        f"tokens {mean['draft']:.3f}",
        (min(gains), max(gains)),
    )  # fmt: skip
    best = max(mean["eagle"], mean["draft"])
    return (
        medusa if mean["medusa"] >= TRAINED else untried(33, few.format(f"heads give {mean['medusa']:.3f} tokens")),
        eagle if best >= TRAINED else untried(34, few.format(f"the better one gives {best:.3f} tokens")),
    )


EXPERIMENT = Experiment(
    "drafts",
    "Medusa and EAGLE heads",
    (33, 34),
    predict,
    measure,
    judge,
    "The number of claim 33 is the share of positions at which two drafts are right, and that of claim 34 "
    "the difference of EAGLE and of a draft on tokens after equal tokens of training. Results stay in the cache.",
    timed=False,
)
