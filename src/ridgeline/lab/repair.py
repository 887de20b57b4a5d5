"""Train students of the measured model for a few tokens: from its weights, and from random ones."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from ridgeline.compress.changed import SameWeights
from ridgeline.compress.convert.heads import PooledWeights, with_kv_heads
from ridgeline.compress.convert.shared import TiedWeights, with_shared_keys
from ridgeline.compress.folder import config_for, open_original, stored_types, write_folder
from ridgeline.compress.grid import Floats
from ridgeline.errors import RequestError
from ridgeline.lab.experiment import Setup
from ridgeline.lab.kept import kept
from ridgeline.lab.texts import texts
from ridgeline.ops.devices import require_torch
from ridgeline.runtime.load import LoadedModel

CONTEXT, BATCH = 128, 1024  # tokens of a row, tokens of an update
RATES = {"logits": 3e-3, "tokens": 1e-2}  # by the stages of training: the best of the sweep in docs/log/training.md
SPREAD = 0.02  # standard deviation of random matrices, as in train/module.py


class Drawn(SameWeights):
    """Random weights: matrices from a normal distribution, vectors 1, and biases 0."""

    def computed(self, name: str) -> Floats:
        own = self._by_name[name]
        if not own.is_matrix:
            return np.full(own.shape, 0.0 if name.endswith("bias") else 1.0, np.float32)
        rng = np.random.default_rng([SEED_OF_START, *name.encode()])
        return rng.normal(0.0, SPREAD, own.shape).astype(np.float32)


SEED_OF_START = 0  # all seeds of training begin with these weights, and read the texts in other orders


def student(original: LoadedModel, change: str, *, drawn: bool) -> SameWeights:
    """Return the model with half of its state: `heads` has half of the key heads, `layers` pairs that share them.

    drawn: whether the weights are random. Raises RequestError for a model that cannot be changed so.
    """
    given = original.model.weights, stored_types(original), original.table.memory.get
    if change == "layers":
        spec = with_shared_keys(original.spec, 2)
        return Drawn(spec, *given) if drawn else TiedWeights(original.spec, spec, *given, None)
    counts = {own.num_kv_heads for own in original.spec.attentions(shared=False)}
    if len(counts) != 1 or min(counts) % 2:
        raise RequestError(
            f"--model {original.checkpoint.folder.name} has layers with {sorted(counts) or 'no'} key heads, of which "
            "half cannot be taken; use a model with an equal and even number everywhere"
        )
    spec = with_kv_heads(original.spec, min(counts) // 2)
    return Drawn(spec, *given) if drawn else PooledWeights(original.spec, spec, *given, "mean", 0)


def repaired(
    setup: Setup, change: str, tokens: int, seed: int, stages: str, *, drawn: bool, rate: float | None = None
) -> dict[str, Any]:
    """Train a student, and return its KL from the original and its perplexity, before and after.

    stages: as of `ridgeline distill`. rate: the learning rate; None: that of RATES. Raises RequestError without torch.
    A result is kept by its content.
    """
    require_torch("a model that is trained in the lab")
    facts = {
        "change": change, "tokens": tokens, "seed": seed, "stages": stages, "drawn": drawn, "few": setup.quick,
        "rate": rate or RATES[stages], "context": CONTEXT, "batch": BATCH, "format": 1,
    }  # fmt: skip
    return kept(setup.model, facts, lambda: _train(setup, change, tokens, seed, stages, drawn, rate or RATES[stages]))


def _train(setup: Setup, change: str, tokens: int, seed: int, stages: str, drawn: bool, rate: float) -> dict[str, Any]:
    from ridgeline.train import Corpus
    from ridgeline.train.distill import DistillOptions, distill, parse_stages

    original = open_original(setup.model, setup.threads)
    weights = student(original, change, drawn=drawn)
    options = DistillOptions(
        tokens=tokens, stages=parse_stages(stages), context=CONTEXT, batch_tokens=BATCH, learning_rate=rate, seed=seed,
        held_out=0.1, repeat=100,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as name:
        config, names, _ = config_for(original, weights, "auto")
        write_folder(Path(name) / "student", original, weights, config, names)
        found = distill(
            str(Path(name) / "student"), setup.model, Corpus.from_paths(texts(setup.quick)), Path(name) / "out", options
        )  # fmt: skip
    return {
        "kl": [found.before.kl.value, found.after.kl.value],
        "perplexity": [found.before.other.perplexity.value, found.after.other.perplexity.value],
        "original": found.after.original.perplexity.value, "tokens": found.tokens,
    }  # fmt: skip
