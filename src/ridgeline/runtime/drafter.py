"""Run a draft model over the pages of its target.

Both models read the same tokens, so a page holds the rows of both (spec/groups.py:with_layers). Prefix reuse, forks,
copies, preemption and swaps of the target thereby also serve its draft. A step of the target writes only its own rows,
so a `Filled` knows for each page how many rows of the draft are right. Before it proposes, the draft runs the tokens
whose rows are missing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from ridgeline.errors import RequestError
from ridgeline.nn.model import Model
from ridgeline.runtime.arena import Arena, ArenaPart
from ridgeline.runtime.drafts import DraftInputs
from ridgeline.runtime.graphs import Decoded, DecodeGraphs
from ridgeline.runtime.layout import Ints, Slices, build_layout
from ridgeline.runtime.load import LoadedModel
from ridgeline.runtime.step import PagedStep
from ridgeline.sample.acceptance import draw_draft
from ridgeline.sample.logits import Floats
from ridgeline.sample.rejection import Draft
from ridgeline.sample.sampler import Best, SampleRow, take_best
from ridgeline.sched.work import PageCopy, StepPlan, Work
from ridgeline.spec.acceptance import Acceptance
from ridgeline.spec.groups import NULL_PAGE, StateGroup

RECORDED_TOKENS = 2  # of each sequence; longer spans are rare, and each length would be recorded


class Ask(NamedTuple):
    """A sequence that wants drafts.

    row: its row in the page tables. tokens: its prompt and answer so far. depth: number of drafts, at least 1; pages
    for len(tokens) + depth - 1 tokens are in the page tables. sampling: draws the drafts; at the next token's position.
    """

    row: int
    tokens: Sequence[int]
    depth: int
    sampling: SampleRow


class Span(NamedTuple):
    """Tokens of a row from a position on."""

    row: int
    start: int
    tokens: Sequence[int]


class Filled:
    """Counts the first rows of each page that the draft has computed.

    groups: the draft's groups. tables: their page tables. num_pages, num_host_pages: pages of each group.
    """

    def __init__(
        self, groups: Sequence[StateGroup], tables: Sequence[Ints], num_pages: Sequence[int],
        num_host_pages: Sequence[int],
    ) -> None:  # fmt: skip
        self._groups, self._tables = groups, tables
        self._device = [np.zeros(n, np.int64) for n in num_pages]
        self._host = [np.zeros(n, np.int64) for n in num_host_pages]
        self._keep_null()

    def drop(self, works: Sequence[Work]) -> None:
        """Record that the target wrote the rows of works, whose pages held other tokens before."""
        for group, table, filled in zip(self._groups, self._tables, self._device, strict=True):
            size = group.page_tokens
            for work in works:  # most have one token: numpy would take longer
                first, last = work.start // size, (work.start + len(work.tokens) - 1) // size
                page, slot = table[work.row, first], work.start % size
                if filled[page] > slot:
                    filled[page] = slot
                if last > first:
                    filled[table[work.row, first + 1 : last + 1]] = 0
            filled[NULL_PAGE] = size

    def add(self, rows: Ints, starts: Ints, ends: Ints) -> None:
        """Record that the draft has computed rows [start, end) of sequences, whose rows before are right."""
        for filled, pages, slots in self._at(rows, starts, ends):
            np.maximum.at(filled, pages, slots + 1)
        self._keep_null()

    def _at(self, rows: Ints, starts: Ints, ends: Ints) -> Iterator[tuple[Ints, Ints, Ints]]:
        """Yield the counts of each group, and the page and slot of each row."""
        slices = Slices.plain(rows, starts, ends - starts)
        owner, positions = np.repeat(rows, slices.lengths), slices.positions()
        for group, table, filled in zip(self._groups, self._tables, self._device, strict=True):
            size = group.page_tokens
            yield filled, table[owner, positions // size], positions % size

    def end(self, row: int, length: int) -> int:
        """Return how many of the first `length` tokens of a sequence need not be run again."""
        for group, table, filled in zip(self._groups, self._tables, self._device, strict=True):
            size = group.page_tokens
            pages = np.arange(group.first_live_page(length), group.num_pages(length))
            short = np.flatnonzero(filled[table[row, pages]] < size)
            if short.size:
                first = int(pages[short[0]])
                length = min(length, first * size + int(filled[table[row, first]]))
        return length

    def move(self, group: int, copies: Sequence[PageCopy], *, source: str, target: str) -> None:
        """Record copies of pages of a group. source, target: "device" or "host"."""
        arrays = {"device": self._device, "host": self._host}
        for copy in copies:
            arrays[target][group][copy.dst] = arrays[source][group][copy.src]
        self._keep_null()

    def _keep_null(self) -> None:
        for filled, group in zip(self._device, self._groups, strict=True):
            filled[NULL_PAGE] = group.page_tokens  # nobody reads it


class Drafter:
    """Proposes drafts with a model that shares the pages of its target.

    loaded: the draft, whose layers follow the target's in the arena. groups, tables, num_pages, num_host_pages: the
    runner's, for both models. max_tokens: most tokens of a forward pass. vocab_size: the target's. acceptance: how
    drafts are accepted, which decides how they are drawn.
    """

    def __init__(
        self, loaded: LoadedModel, first_layer: int, groups: Sequence[StateGroup], tables: Sequence[Ints], arena: Arena,
        num_pages: Sequence[int], num_host_pages: Sequence[int], max_tokens: int, vocab_size: int,
        acceptance: Acceptance,
    ) -> None:  # fmt: skip
        self._acceptance: Acceptance = acceptance
        self._vocab_size = vocab_size
        self._most_id = loaded.spec.vocab_size - 1  # the target may have more unused tokens
        self._model: Model = loaded.model
        self._table, self._memory, self._max_tokens = loaded.table, loaded.table.memory, max_tokens
        self._layers = ArenaPart(arena, groups, first_layer)
        own = self._layers.groups
        self._groups, self._tables = [groups[g] for g in own], [tables[g] for g in own]
        self._filled = Filled(self._groups, self._tables, [num_pages[g] for g in own], [num_host_pages[g] for g in own])
        self._inputs = DraftInputs(len(tables[0]), 0, loaded.table)
        self._graphs = DecodeGraphs(self._model, self._table, self._groups, self._layers, self._inputs, self._tables)
        self._chunks: list[Work] = []  # works of the target's last step that ended inside a prompt

    def follow(self, plan: StepPlan) -> None:
        """Take note of a step that the target runs."""
        if plan.copies or plan.swap_out or plan.swap_in:
            self._move(plan)
        self._chunks = [work for work in plan.works if not work.num_draft and not work.sample]
        self._filled.drop(plan.works)

    def _move(self, plan: StepPlan) -> None:
        """Take note of whole pages that move."""
        for copies, source, target in (
            (plan.swap_out, "device", "host"), (plan.swap_in, "host", "device"), (plan.copies, "device", "device")
        ):  # fmt: skip
            for g, group in enumerate(self._layers.groups):
                self._filled.move(g, [c for c in copies if c.group == group], source=source, target=target)

    def _follow_chunks(self) -> None:
        """Run the chunks of prompts of the last step, if the rows before them are right."""
        chunks = [w for w in self._chunks if self._filled.end(w.row, w.start) == w.start]
        self._chunks = []
        if chunks:
            self._forward([Span(w.row, w.start, w.tokens) for w in chunks])

    def draft(self, asks: Sequence[Ask], *, follow: bool = True) -> list[list[Draft]]:
        """Return drafts for each sequence: `depth`, or fewer if the draft fails or must run too many tokens before.

        To be called after each step of the target, before pages are taken for the next one. follow: also run the
        chunks of prompts that the target has run, so that their sequences can have drafts sooner.
        """
        if follow:
            self._follow_chunks()
        drafts: list[list[Draft]] = [[] for _ in asks]
        work, ready = self._missing(asks)
        if not work:
            return drafts
        found, going = self._run(work, [asks[i].sampling for i in ready]), ready
        while going:
            going = self._take(asks, drafts, going, found)
            if going:
                last = [
                    Span(asks[i].row, len(asks[i].tokens) + len(drafts[i]) - 1, (drafts[i][-1].token,)) for i in going
                ]
                found = self._run(last, [asks[i].sampling for i in going])
        return drafts

    def _missing(self, asks: Sequence[Ask]) -> tuple[list[Span], list[int]]:
        """Return what must run before the first draft, and the indices of the sequences that can draft then.

        Their spans come first. One that has more missing tokens than a pass takes continues in the next step.
        """
        ready, spans, later, left = list[int](), list[Span](), list[Span](), self._max_tokens
        for i, (row, tokens, _, _) in enumerate(asks):
            known = len(tokens)
            # Two tokens if one or two are missing: then all steps have one shape, which is recorded once.
            start = max(0, min(self._filled.end(row, known - 1), known - 2))
            run = tokens[start : min(known, start + left)]
            left -= len(run)
            if start + len(run) == known:
                ready.append(i)
                spans.append(Span(row, start, run))
            elif run:
                later.append(Span(row, start, run))
        return spans + later, ready

    def _take(
        self, asks: Sequence[Ask], drafts: Sequence[list[Draft]], going: Sequence[int], found: Best | Floats
    ) -> list[int]:
        """Draw a draft for the sequences that go on; return those that want another."""
        left = []
        for i, draft in zip(going, self._drawn(asks, drafts, going, found), strict=True):
            if draft is None:
                continue
            drafts[i].append(draft)
            if len(drafts[i]) < asks[i].depth and not asks[i].sampling.is_end(draft.token):
                left.append(i)
        return left

    def _drawn(
        self, asks: Sequence[Ask], drafts: Sequence[Sequence[Draft]], going: Sequence[int], found: Best | Floats
    ) -> Iterator[Draft | None]:
        """Yield the next draft of each sequence; None where the draft's logits are broken."""
        if isinstance(found, Best):
            for one in take_best(found):
                is_known = not isinstance(one, RequestError) and one.token < self._vocab_size
                yield Draft(one.token) if is_known and not isinstance(one, RequestError) else None
            return
        for i, logits in zip(going, found[:, : self._vocab_size], strict=True):
            try:
                yield draw_draft(logits, asks[i].sampling.ahead(len(drafts[i])), self._acceptance)
            except RequestError:
                yield None

    def _run(self, spans: Sequence[Span], sampling: Sequence[SampleRow]) -> Best | Floats:
        """Run tokens; return the logits [n, vocabulary], or the best tokens, after each of the first n spans.

        sampling: how the tokens after the n spans are drawn.
        """
        lengths = [len(span.tokens) for span in spans]
        ends = np.cumsum(lengths)[: len(sampling)] - 1
        decoded = self._recorded(spans, lengths) if max(lengths) <= RECORDED_TOKENS else None
        if decoded is None:
            return self._forward(spans, ends)
        every = len(ends) == sum(lengths)
        if all(row.wants_best() for row in sampling):
            best, logits = np.asarray(decoded.best), np.asarray(decoded.best_logits)
            return Best(best, logits) if every else Best(best[ends], logits[ends])
        logits = self._memory.get(decoded.logits)
        return logits if every else logits[ends]

    def _recorded(self, spans: Sequence[Span], lengths: Sequence[int]) -> Decoded | None:
        """Run tokens from a recording; None if there is none for so many."""
        rows, starts, tokens = ([*x] for x in zip(*spans, strict=True))
        turned, tables = None, self._model.frequency_tables
        if tables is not None:
            positions = Slices.plain(np.array(rows), np.array(starts), np.array(lengths)).positions()
            turned = tables.rows(np.zeros_like(positions), positions).tolist()
        ids = [min(token, self._most_id) for run in tokens for token in run]
        decoded = self._graphs.run(rows, starts, lengths, ids, turned)
        if decoded is not None:
            self._filled.add(np.array(rows), np.array(starts), np.array(starts) + np.array(lengths))
        return decoded

    def _forward(self, spans: Sequence[Span], logits: Ints | None = None) -> Floats:
        """Run tokens unrecorded; return the logits of some of them [n, vocabulary].

        logits: indices of their tokens; None: there are none.
        """
        rows, starts = np.array([span.row for span in spans]), np.array([span.start for span in spans])
        lengths = np.array([len(span.tokens) for span in spans])
        slices, memory = Slices.plain(rows, starts, lengths), self._memory
        tokens = np.fromiter((t for span in spans for t in span.tokens), np.int64, int(lengths.sum()))
        step = PagedStep(
            memory.integers(np.minimum(tokens, self._most_id)),
            memory.integers(slices.positions()),
            slices,
            [
                build_layout(slices, table, group.page_tokens, group.lookback, memory, group.first_tokens)
                for group, table in zip(self._groups, self._tables, strict=True)
            ],
            self._layers,
            self._inputs,
            self._table,
        )
        stream = self._model.forward(step)
        self._filled.add(rows, starts, starts + lengths)
        if logits is None or not logits.size:
            return np.empty((0, self._most_id + 1), np.float32)
        return memory.get(self._model.logits(stream, memory.integers(logits)))
