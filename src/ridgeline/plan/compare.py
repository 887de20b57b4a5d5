"""Compare techniques: the same load on the same machine, one change at a time, most tokens per second first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ridgeline.cost.footprint import Footprint, formula_bytes
from ridgeline.plan.changes import FindDraft, change, published_draft, query_heads
from ridgeline.plan.expected import Band, expected
from ridgeline.plan.planner import Deployment, Figures, Load, Planner
from ridgeline.plan.speculation import Speculation
from ridgeline.plan.units import decimal_bytes
from ridgeline.spec import ModelSpec

BASE = "unchanged"


@dataclass(frozen=True, slots=True)
class Row:
    """One deployment of a comparison. sequence_bytes: state of a sequence by the formula, over all devices of a
    replica.

    largest_batch: largest batch that fits on each replica. pays_below: with drafts or passes over blocks, the batch
    from which on they no longer pay; None if they always pay or there are none. notes: remarks for the table. expected:
    percentiles of the tokens per second; None where too little is known of the machine.
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
    expected: Band | None = None

    @property
    def tokens_per_s_per_device(self) -> float:
        return self.figures.tokens_per_s / self.figures.devices


def compare(
    deployment: Deployment, load: Load, changes: Sequence[str], find_draft: FindDraft = published_draft
) -> tuple[Row, ...]:
    """Return the deployment and each changed one, ranked by the load's decode tokens per second. Deployments that do
    not fit in memory come last.

    Raises RequestError for a change that is unknown or that the model cannot have.
    """
    rows = [_row(deployment, load, BASE, "", deployment.spec)]
    for text in changes:
        after = change(deployment, text, find_draft)
        rows.append(_row(after.deployment, load, text, after.gives_up, deployment.spec))
    return tuple(sorted(rows, key=lambda row: (not row.footprint.fits, -row.figures.tokens_per_s)))


def _row(deployment: Deployment, load: Load, text: str, gives_up: str, unchanged: ModelSpec) -> Row:
    planner = Planner(deployment)
    figures = planner.figures(load)
    largest = planner.memory.largest_batch(load.context)
    best = deployment.scheme.replicas * largest / planner.token_s(largest, load.context) if largest else 0.0
    found = expected(planner, load, figures)
    pays = planner.speculation_pays_below(load.context) or planner.diffusion_pays_below(load.context)
    return Row(
        text, gives_up, figures, planner.footprint(load),
        _sequence_bytes(deployment, load.context), largest, best, pays,
        tuple(_notes(planner, load, pays, text, unchanged)), found.bands["tokens_per_s"] if found else None,
    )  # fmt: skip


def _sequence_bytes(deployment: Deployment, context: int) -> float:
    draft, precision = deployment.draft, deployment.precision
    own = formula_bytes(deployment.spec, precision, context)
    return own + (formula_bytes(draft.spec, precision, context) if draft and draft.spec is not None else 0.0)


def _notes(planner: Planner, load: Load, pays_below: int | None, text: str, unchanged: ModelSpec) -> list[str]:
    notes, deployment = [], planner.deployment
    if drafts := deployment.speculation:
        notes.append(f"{drafts.tokens:.2f} tokens expected per verification of {drafts.depth} drafts")
        if drafts.draft is not None:
            notes += _draft_notes(planner, drafts, load)
    if deployment.blocks is not None:
        at = load.batch, load.context
        one = planner.decode(*at, tokens=1).seconds
        notes.append(f"a pass over {deployment.blocks.size} tokens takes {planner.decode(*at).seconds / one:.2f} steps")
    if deployment.speculation or deployment.blocks:
        if pays_below is None:
            notes.append("faster at every batch size")
        else:
            notes.append(f"faster below a batch of {pays_below}" if pays_below > 1 else "never faster here")
    heads = query_heads(unchanged)
    if heads and text == f"kv_heads={heads}":
        notes.append("the cache is then as large as is often quoted, as if each query head had its own keys and values")
    return notes


def _draft_notes(planner: Planner, drafts: Speculation, load: Load) -> Iterator[str]:
    """Yield the acceptance and its source, the share of a step that drafting takes, and the memory of the draft."""
    draft = drafts.draft
    assert draft is not None
    yield f"acceptance {drafts.acceptance_text} ({drafts.source})"
    if draft.spec is None:
        return
    step = planner.decode(load.batch, load.context).seconds
    verification, drafting = (f(load.batch, load.context) / step for f in (planner.verification_s, planner.drafting_s))
    yield f"a verification takes {verification:.2f} steps, its drafts {drafting:.2f}"
    state = planner.memory.draft_sequence_bytes(load.context)
    weights = decimal_bytes(planner.memory.draft_weight_bytes)
    yield f"{draft.name} takes {weights} of weights, and {decimal_bytes(state)} of state for each sequence"
    if isinstance(draft.spec, ModelSpec) and draft.spec.vocab_size != planner.deployment.spec.vocab_size:
        yield (
            f"{draft.name} has {draft.spec.vocab_size:,} tokens and the model {planner.deployment.spec.vocab_size:,}; "
            "both need the same tokenizer"
        )
