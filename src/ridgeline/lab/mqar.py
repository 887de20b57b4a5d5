"""Small models that learn associative recall (MQAR), or to tell the first token; each result is kept by its content."""

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
    return _learned(spec, {"pairs": pairs}, rate, updates, seed)


def remembered(spec: ModelSpec, length: int, rate: float, updates: int, seed: int) -> float:
    """Train a model, and return how often it tells the first of `length` tokens, as `train.recall` measures it.

    Raises RequestError without torch.
    """
    return _learned(spec, {"length": length}, rate, updates, seed)


def _learned(spec: ModelSpec, size: dict[str, int], rate: float, updates: int, seed: int) -> float:
    require_torch("a model that is trained in the lab")
    from ridgeline.train import recall

    facts = {"spec": to_json(spec), **size, "rate": rate, "updates": updates, "seed": seed, **recall.CHOICES}

    def make() -> dict[str, Any]:
        if "pairs" in size:
            return {"accuracy": recall.train_recall(spec, size["pairs"], rate, updates, seed)}
        return {"accuracy": recall.train_first(spec, size["length"], rate, updates, seed)}

    return float(kept(None, facts, make)["accuracy"])
