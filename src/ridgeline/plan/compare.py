"""Techniques side by side: the same load on the same machine, one change at a time, most tokens per second first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ridgeline.cost.footprint import Footprint, formula_bytes
from ridgeline.plan.changes import change, query_heads
from ridgeline.plan.planner import Deployment, Figures, Load, Planner

BASE = "as it is"


@dataclass(frozen=True, slots=True)
class Row:
    """One way to run it. sequence_bytes: state of a sequence by the formula, over all of a replica's devices.

    largest_batch: that fits, on each replica. pays_below: with drafts, the batch from which on they are no gain; None
    where they always are, or where there are none. notes: what an expert would add.
    """

    text: str
    gives_up: str
    figures: Figures
    footprint: Footprint
    sequence_bytes: float
    largest_batch: int
    best_tokens_per_s: float
    pays_below: int | None
    notes: tuple[str, ...] = ()

    @property
    def tokens_per_s_per_device(self) -> float:
        return self.figures.tokens_per_s / self.figures.devices


def compare(deployment: Deployment, load: Load, changes: Sequence[str]) -> tuple[Row, ...]:
    """The deployment as it is, and with each change: ranked by tokens per second of the load, decodes only; what does
    not fit the memory comes last.

    Raises RequestError for a change that is not known or that the model cannot have.
    """
    rows = [_row(deployment, load, BASE, "")]
    for text in changes:
        after = change(deployment, text)
        rows.append(_row(after.deployment, load, text, after.gives_up))
    return tuple(sorted(rows, key=lambda row: (not row.footprint.fits, -row.figures.tokens_per_s)))


def _row(deployment: Deployment, load: Load, text: str, gives_up: str) -> Row:
    planner = Planner(deployment)
    figures = planner.figures(load)
    largest = planner.memory.largest_batch(load.context)
    best = deployment.scheme.replicas * largest / planner.token_s(largest, load.context) if largest else 0.0
    pays = planner.speculation_pays_below(load.context)
    return Row(
        text, gives_up, figures, planner.footprint(load),
        formula_bytes(deployment.spec, deployment.precision, load.context), largest, best, pays,
        tuple(_notes(deployment, text, pays)),
    )  # fmt: skip


def _notes(deployment: Deployment, text: str, pays_below: int | None) -> list[str]:
    notes = []
    if drafts := deployment.speculation:
        notes.append(f"{drafts.tokens:.2f} tokens expected from each verification of {drafts.depth} drafts")
        if pays_below is None:
            notes.append("pays at every batch")
        else:
            notes.append(f"pays below a batch of {pays_below}" if pays_below > 1 else "never pays here")
    heads = query_heads(deployment.spec)
    if text == BASE and heads:
        notes.append(f"kv_heads={heads} is the figure often quoted, as if every query head had keys of its own")
    return notes
