"""Small models that are trained on associative recall (MQAR); each result is kept by its content."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ridgeline.lab.kept import kept
from ridgeline.ops.devices import require_torch
from ridgeline.spec import GatedMLP, Layer, ModelSpec, RMSNorm, to_json
from ridgeline.spec.mixers import TokenMixer

WIDTH = 64  # numbers of a token


def small(mixers: Sequence[TokenMixer], vocab: int) -> ModelSpec:
    """Return a model with these mixers, each before an MLP."""
    norm = RMSNorm(1e-5)
    layers = tuple(Layer(mixer, GatedMLP(2 * WIDTH), norm) for mixer in mixers)
    return ModelSpec("mqar", vocab, WIDTH, 1 << 20, layers, norm)


def recalled(spec: ModelSpec, pairs: int, rate: float, updates: int, seed: int) -> float:
    """Train a model, and return the share of queries that it answers rightly, as `train.recall` measures it.

    Raises RequestError without torch.
    """
    require_torch("a model that is trained in the lab")
    from ridgeline.train.recall import CHOICES, train_recall

    facts = {"spec": to_json(spec), "pairs": pairs, "rate": rate, "updates": updates, "seed": seed, **CHOICES}

    def make() -> dict[str, Any]:
        return {"accuracy": train_recall(spec, pairs, rate, updates, seed)}

    return float(kept(None, facts, make)["accuracy"])
