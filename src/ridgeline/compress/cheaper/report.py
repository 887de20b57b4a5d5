"""The report of the chain: the price of each model, how much was recovered, and what was lost, in words."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

ORIGINAL, CHANGED, REPAIRED, RANDOM = "original", "changed", "repaired", "random"
LEAST_LOSS = 0.05  # of recall in a cell, below which it is not named


@dataclass(frozen=True, slots=True)
class CheaperReport:
    """The result of a chain. The keys of its JSON are those of the reports of `prune` and `convert`.

    Attributes:
        title: a line that says what was done. models: the figures of each model by name. tried: candidates, with their
            predicted figures and their quality after the short repair, the best one first. results: lines about the
            limits, recovery, losses and `verify`. source: where the texts come from. machine: how far predictions can
            be trusted. held_out_tokens: tokens on which quality was measured. notes: remarks for the user.
    """

    title: str
    models: Mapping[str, Mapping[str, Any]]
    tried: Sequence[Mapping[str, Any]]
    results: Sequence[str]
    source: str
    machine: str
    held_out_tokens: int
    recovery: float | None
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the report as plain values."""
        named = {CHANGED: "before repair", REPAIRED: "after it"}
        if RANDOM in self.models:
            named[RANDOM] = "the same shape from random weights, trained on the same tokens"
        return {
            "title": self.title, "models": {name: dict(values) for name, values in self.models.items()},
            "names": named, "tried": [dict(one) for one in self.tried], "results": list(self.results),
            "calibration": self.source, "machine": self.machine, "held_out_tokens": self.held_out_tokens,
            "recovery": self.recovery, "read_back_difference": None, "notes": list(self.notes),
        }  # fmt: skip


def recovery_of(models: Mapping[str, Mapping[str, Any]]) -> float | None:
    """Return (loss from random weights - repaired) / (loss from random weights - original), in held-out nats; None if
    there is no model from random weights, or if it is no worse than the original.
    """
    if RANDOM not in models:
        return None
    random, repaired, original = (math.log(models[name]["perplexity"]) for name in (RANDOM, REPAIRED, ORIGINAL))
    return (random - repaired) / (random - original) if random > original else None


def losses(models: Mapping[str, Mapping[str, Any]], last: str) -> str:
    """Return in words what the model named `last` lost: perplexity, and associative recall where it fell most."""
    before, after = models[ORIGINAL], models[last]
    ratio = after["perplexity"] / before["perplexity"]
    found = [f"perplexity {before['perplexity']:.4g} -> {after['perplexity']:.4g} ({ratio:.2f} times)"]
    cells = before.get("recall_by_pairs", {}), after.get("recall_by_pairs", {})
    fell = {pairs: value - cells[1][pairs] for pairs, value in cells[0].items() if pairs in cells[1]}
    if fell:
        worst = max(fell, key=lambda pairs: fell[pairs])
        if fell[worst] >= LEAST_LOSS:
            found.append(f"recall at {worst} pairs {cells[0][worst]:.2f} -> {cells[1][worst]:.2f}")
        else:
            found.append(f"less than {LEAST_LOSS:g} of recall at every number of pairs")
    return f"lost: {', '.join(found)}"
