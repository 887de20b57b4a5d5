"""Propose drafts with a draft model that shares the pages of its target.

Before it proposes, the draft model runs the tokens whose rows are missing.
"""

from __future__ import annotations

from collections.abc import Sequence

from ridgeline.ops.api import Array
from ridgeline.runtime.chain import ModelChain
from ridgeline.runtime.drafter import Ask, ChainDrafter, Place, Span
from ridgeline.runtime.layout import Ints
from ridgeline.runtime.load import LoadedModel
from ridgeline.sched.work import Result, StepPlan, Work

RECORDED_TOKENS = 2  # of each sequence; longer spans are rare, and each length would be recorded


class ModelDrafter(ChainDrafter):
    """Proposes drafts with a model. loaded: the draft, whose layers follow the target's in the arena."""

    def __init__(self, loaded: LoadedModel, place: Place) -> None:
        chain = ModelChain(loaded.model, place.vocab_size, place.table)
        super().__init__(chain, place, loaded.spec.vocab_size - 1, RECORDED_TOKENS)
        self._chunks: list[Work] = []  # works of the target's last step that ended inside a prompt

    def follow(self, plan: StepPlan) -> None:
        super().follow(plan)
        self._chunks = [work for work in plan.works if not work.sample]

    def ran(self, plan: StepPlan, tokens: Ints, features: Array | None) -> None:
        """Do nothing: a draft model reads tokens only."""

    def settle(self, works: Sequence[Work], results: Sequence[Result]) -> None:
        """Do nothing: a draft model reads tokens only, and proposes chains."""

    def _prepare(self, asks: Sequence[Ask], follow: bool) -> None:
        """Run the chunks of prompts of the target's last step, if the rows before them are right."""
        chunks = [w for w in self._chunks if follow and self._filled.end(w.row, w.start) == w.start]
        self._chunks = [] if follow else self._chunks
        if chunks:
            self._forward([Span(w.sequence, w.row, w.start, w.tokens) for w in chunks])

    def _missing(self, asks: Sequence[Ask]) -> tuple[list[Span], list[int]]:
        """Return what must run first. A sequence with more tokens than a pass takes continues in the next step."""
        ready, spans, later, left = list[int](), list[Span](), list[Span](), self._max_tokens
        for i, (sequence, row, tokens, _, _) in enumerate(asks):
            known = len(tokens)
            # Two tokens if one or two are missing: then all steps have one shape, which is recorded once.
            start = max(0, min(self._filled.right(sequence, row, known - 1), known - 2))
            run = tokens[start : min(known, start + left)]
            left -= len(run)
            if start + len(run) == known:
                ready.append(i)
                spans.append(Span(sequence, row, start, run))
            elif run:
                later.append(Span(sequence, row, start, run))
        return spans + later, ready

    def _computed(self, span: Span, rounds: int) -> None:
        self._filled.computed(span.sequence, span.row, span.start, span.start + len(span.tokens) + rounds - 1)
