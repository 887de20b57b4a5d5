"""Propose drafts with an EAGLE head, whose layer shares the pages of its target.

Row p of the head reads the target's feature of position p and the token at p + 1, so it can run when that token is
known. Rows of a prompt's chunk run as soon as the target has computed the chunk. Later rows wait until the head drafts.
If their features would be overwritten before, they run then, or are forgotten if the sequence has had no drafts: while
drafts do not pay, the head's rows would take as long as those of a layer of the target. Rows of drafts read features of
the head itself; they are computed again from the target's features when the drafts are accepted.

The head has one layer, so what a row writes does not depend on the rows before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ridgeline.nn.heads import Eagle3Head, EagleHead
from ridgeline.nn.model import Model
from ridgeline.ops.api import Array
from ridgeline.runtime.chain import EagleChain
from ridgeline.runtime.drafter import Ask, ChainDrafter, Place, Span
from ridgeline.runtime.features import Features, Held, is_decode
from ridgeline.runtime.graphs import Tap
from ridgeline.runtime.layout import Ints
from ridgeline.sched.work import Result, StepPlan, Work

FORGOTTEN = 32  # rows of a sequence that are forgotten together


class _Gaps(NamedTuple):
    """Rows of a sequence whose features were lost: ranges [start, end), in order."""

    sequence: int
    ranges: list[tuple[int, int]]

    def add(self, start: int, end: int) -> None:
        """Add rows that follow all others."""
        if self.ranges and self.ranges[-1][1] == start:
            start = self.ranges.pop()[0]
        self.ranges.append((start, end))


class EagleDrafter(ChainDrafter):
    """Proposes drafts with an EAGLE head.

    A sequence can have rows that no head has run: the last one before a prefix that it reuses, those that waited when
    it lost its pages or was forked, and those that were forgotten. These rows read features of zeros when the sequence
    next has drafts. They only make drafts a little worse.
    """

    def __init__(self, head: EagleHead | Eagle3Head, target: Model, place: Place) -> None:
        spec = head.spec
        hidden = spec.hidden_size
        features = Features(place.max_seqs, place.num_drafts, place.max_tokens, hidden, place.table)
        self._features, self._kept = features, features.size - place.num_drafts - 1
        self._eagle = chain = EagleChain(head, target, features, place.table)
        super().__init__(chain, place, spec.vocab_size - 1, place.num_drafts + 1)
        self._gaps: dict[int, _Gaps] = {}  # by row of the page tables
        aux = spec.aux(len(target.spec.layers))
        self.tap = Tap(aux, lambda stream: head.fuse(stream.aux if aux else (target.hidden(stream),)), features)

    def ran(self, plan: StepPlan, tokens: Ints, features: Array | None) -> None:
        """Keep the features of a step; run or forget rows that cannot wait."""
        spans, offset, has_chunks = list[Span](), 0, False
        for work in plan.works:
            held, stop = self._held(work), work.start + len(work.tokens)
            if not is_decode(work):
                spans.append(self._chunk(work, held, tokens[offset : offset + len(work.tokens)], offset))
                held.first, has_chunks = stop - 1, True
            elif stop - held.first > self._kept:
                if held.drafts:
                    spans.append(self._waiting(work, held, int(tokens[offset])))
                    held.first, held.drafts = work.start, False
                else:
                    self._gaps_of(work.sequence, work.row).add(held.first, held.first + FORGOTTEN)
                    held.first += FORGOTTEN
            held.end = stop
            offset += len(work.tokens)
        if has_chunks and features is not None:
            self._features.keep_step(features)
        for part in _parts(spans, self._max_tokens):
            self._forward(part)
        if features is not None:
            self._features.keep(plan.works, tokens, features)

    def settle(self, works: Sequence[Work], results: Sequence[Result]) -> None:
        """Move the features of the accepted drafts of trees to their positions."""
        self._features.settle(works, results)

    def _held(self, work: Work) -> Held:
        """Return which features of a work's sequence are kept, after those of drafts that were rejected are dropped."""
        held = self._features.of(work.sequence, work.row)
        if held is None or not held.first <= work.start <= held.end:
            held = self._features.rows[work.row] = Held(work.sequence, work.start, work.start)
            self._gaps.pop(work.row, None)
            if (right := self._filled.end(work.row, work.start)) < work.start:
                self._gaps_of(work.sequence, work.row).add(right, work.start)
        held.end = work.start
        return held

    def _gaps_of(self, sequence: int, row: int) -> _Gaps:
        """Return the rows of a sequence that were lost."""
        found = self._gaps.get(row)
        if found is None or found.sequence != sequence:
            found = self._gaps[row] = _Gaps(sequence, [])
        return found

    def _chunk(self, work: Work, held: Held, tokens: Ints, offset: int) -> Span:
        """Return the rows of a chunk whose next token is known, and those that waited before it."""
        waiting = self._features.tokens(work.row, held.first + 1, work.start) if held.first < work.start else []
        own = tokens.tolist() if held.first < work.start else tokens[1:].tolist()
        before = self._features.at(work.row, held.first, work.start)
        inside = self._features.of_step(offset, offset + len(tokens) - 1)
        return Span(work.sequence, work.row, held.first, waiting + own, np.concatenate([before, inside]))

    def _waiting(self, work: Work, held: Held, token: int) -> Span:
        """Return the rows before a work, whose features would be lost soon. token: the first one of the work."""
        tokens = [*self._features.tokens(work.row, held.first + 1, work.start), token]
        features = self._features.at(work.row, held.first, work.start)
        return Span(work.sequence, work.row, held.first, tokens, features)

    def _prepare(self, asks: Sequence[Ask], follow: bool) -> None:
        """Run rows whose features were lost, with zeros."""
        spans = []
        for ask in asks:
            held, gaps = self._features.of(ask.sequence, ask.row), self._gaps.get(ask.row)
            if held is None:
                continue
            held.drafts = True
            if gaps is None or gaps.sequence != ask.sequence:
                continue
            for start, end in gaps.ranges:
                tokens = ask.tokens[start + 1 : end + 1]
                spans.append(Span(ask.sequence, ask.row, start, tokens, self._features.zeros(len(tokens))))
            del self._gaps[ask.row]
            self._filled.computed(ask.sequence, ask.row, gaps.ranges[0][0], held.first)
        for part in _parts(spans, self._max_tokens):
            self._forward(part)

    def _missing(self, asks: Sequence[Ask]) -> tuple[list[Span], list[int]]:
        ready, spans, left = list[int](), list[Span](), self._max_tokens
        for i, (sequence, row, tokens, _, _) in enumerate(asks):
            held, known = self._features.of(sequence, row), len(tokens)
            if held is None or held.end < known - 1 or known < 2:
                continue
            held.end = known - 1  # positions after it held drafts that were rejected
            start = min(held.first, known - 2)
            if known - 1 - start > left:
                continue
            left -= known - 1 - start
            ready.append(i)
            features = self._features.at(row, start, known - 1)
            spans.append(Span(sequence, row, start, tokens[start + 1 : known], features))
        return spans, ready

    def _computed(self, span: Span, rounds: int) -> None:
        end = span.start + len(span.tokens)
        held = self._features.of(span.sequence, span.row)
        if held is None or end > held.end:
            return  # the row of a draft
        held.first = max(held.first, end)
        if span.row not in self._gaps:
            self._filled.computed(span.sequence, span.row, span.start, end)


def _parts(spans: Sequence[Span], most: int) -> list[list[Span]]:
    """Return spans in groups of at most `most` tokens, in order; longer ones are cut."""
    parts: list[list[Span]] = [[]]
    left = most
    for sequence, row, start, tokens, features in spans:
        at = 0
        while at < len(tokens):
            if not left:
                parts.append([])
                left = most
            end = min(len(tokens), at + left)
            cut = None if features is None else features[at:end]
            parts[-1].append(Span(sequence, row, start + at, tokens[at:end], cut))
            left -= end - at
            at = end
    return parts if parts[0] else []
