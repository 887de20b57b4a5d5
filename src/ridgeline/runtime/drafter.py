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
from ridgeline.runtime.graphs import DecodeGraphs
from ridgeline.runtime.layout import Ints, Slices, build_layout
from ridgeline.runtime.load import LoadedModel
from ridgeline.runtime.step import PagedStep
from ridgeline.sample.logits import Floats
from ridgeline.sample.sampler import Best, SampleRow, sample, take_best
from ridgeline.sched.work import PageCopy, StepPlan, Work
from ridgeline.spec.groups import NULL_PAGE, StateGroup


class Ask(NamedTuple):
    """A sequence that wants drafts.

    row: its row in the page tables. tokens: its prompt and answer so far. depth: number of drafts, at least 1; pages
    for len(tokens) + depth - 1 tokens are in the page tables. sampling: draws the drafts; at the next token's position.
    """

    row: int
    tokens: Sequence[int]
    depth: int
    sampling: SampleRow


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

    def drop(self, rows: Ints, starts: Ints, ends: Ints) -> None:
        """Record that the target wrote rows [start, end) of sequences, whose pages held other tokens before."""
        for filled, pages, slots in self._at(rows, starts, ends):
            np.minimum.at(filled, pages, slots)
        self._keep_null()

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
    runner's, for both models. max_tokens: most tokens of a forward pass. vocab_size: the target's.
    """

    def __init__(
        self, loaded: LoadedModel, first_layer: int, groups: Sequence[StateGroup], tables: Sequence[Ints], arena: Arena,
        num_pages: Sequence[int], num_host_pages: Sequence[int], max_tokens: int, vocab_size: int,
    ) -> None:  # fmt: skip
        self._vocab_size = vocab_size
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
        for copies, source, target in (
            (plan.swap_out, "device", "host"), (plan.swap_in, "host", "device"), (plan.copies, "device", "device")
        ):  # fmt: skip
            for g, group in enumerate(self._layers.groups):
                self._filled.move(g, [c for c in copies if c.group == group], source=source, target=target)
        works = plan.works
        self._chunks = [w for w in works if not w.num_draft and not w.sample]
        if works:
            starts = np.array([w.start for w in works])
            lengths = np.array([len(w.tokens) for w in works])
            self._filled.drop(np.array([w.row for w in works]), starts, starts + lengths)

    def _follow_chunks(self) -> None:
        """Run the chunks of prompts of the last step, if the rows before them are right."""
        chunks = [w for w in self._chunks if self._filled.end(w.row, w.start) == w.start]
        self._chunks = []
        if chunks:
            self._forward([(w.row, w.start, w.tokens) for w in chunks])

    def draft(self, asks: Sequence[Ask]) -> list[list[int]]:
        """Return drafts for each sequence: `depth`, or fewer if the draft fails or must run too many tokens before.

        To be called after each step of the target, before pages are taken for the next one.
        """
        self._follow_chunks()
        drafts: list[list[int]] = [[] for _ in asks]
        left, ready, slices = self._max_tokens, [], []
        for i, ask in enumerate(asks):
            known = len(ask.tokens)
            start = self._filled.end(ask.row, known - 1)
            tokens = ask.tokens[start : min(known, start + left)]
            if not tokens:
                continue
            left -= len(tokens)
            slices.append((ask.row, start, tokens))
            if start + len(tokens) == known:
                ready.append((i, len(slices) - 1))
        if not slices:
            return drafts
        ends = np.cumsum([len(tokens) for _, _, tokens in slices]) - 1
        found: Best | Floats = self._forward(slices, ends[[at for _, at in ready]])
        going = [i for i, _ in ready]
        while going:
            going = self._take(asks, drafts, going, found)
            if going:
                found = self._next(asks, drafts, going)
        ran = [i for i, _ in ready if len(drafts[i]) > 1]  # all but the last draft
        if ran:
            starts = np.array([len(asks[i].tokens) for i in ran])
            self._filled.add(np.array([asks[i].row for i in ran]), starts, starts + [len(drafts[i]) - 1 for i in ran])
        return drafts

    def _take(
        self, asks: Sequence[Ask], drafts: Sequence[list[int]], going: Sequence[int], found: Best | Floats
    ) -> list[int]:
        """Draw a draft for the sequences that go on; return those that want another."""
        if isinstance(found, Best):
            drawn = take_best(found)
        else:
            drawn = sample(found, [asks[i].sampling.ahead(len(drafts[i])) for i in going])
        left = []
        for i, one in zip(going, drawn, strict=True):
            if isinstance(one, RequestError):  # NaN: the sequence continues without this draft
                continue
            if one.token >= self._vocab_size:  # one of the draft's unused tokens
                continue
            drafts[i].append(one.token)
            if len(drafts[i]) < asks[i].depth and not asks[i].sampling.is_end(one.token):
                left.append(i)
        return left

    def _next(self, asks: Sequence[Ask], drafts: Sequence[Sequence[int]], going: Sequence[int]) -> Best | Floats:
        """Run the last draft of each sequence that goes on."""
        rows, last = [asks[i].row for i in going], [drafts[i][-1] for i in going]
        positions = [len(asks[i].tokens) + len(drafts[i]) - 1 for i in going]
        tables, at = self._model.frequency_tables, np.array(positions)
        turned = None if tables is None else tables.rows(np.zeros_like(at), at).tolist()
        decoded = self._graphs.run(rows, last, positions, turned)
        if decoded is None:
            return self._forward(
                [(r, at, (t,)) for r, at, t in zip(rows, positions, last, strict=True)], np.arange(len(rows))
            )
        if all(asks[i].sampling.wants_best() for i in going):
            return Best(np.asarray(decoded.best), np.asarray(decoded.best_logits))
        return self._memory.get(decoded.logits)

    def _forward(self, work: Sequence[tuple[int, int, Sequence[int]]], logits: Ints | None = None) -> Floats:
        """Run tokens from a position of a row on, for several rows; return the logits of some of them [n, vocabulary].

        logits: indices of their tokens; None: there are none.
        """
        rows, starts = np.array([row for row, _, _ in work]), np.array([start for _, start, _ in work])
        lengths = np.array([len(tokens) for _, _, tokens in work])
        slices, memory = Slices.plain(rows, starts, lengths), self._memory
        tokens = np.fromiter((t for _, _, tokens in work for t in tokens), np.int64, int(lengths.sum()))
        tokens = np.minimum(tokens, self._model.spec.vocab_size - 1)  # the target may have more unused tokens
        step = PagedStep(
            memory.integers(tokens),
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
            return np.empty((0, self._model.spec.vocab_size), np.float32)
        return memory.get(self._model.logits(stream, memory.integers(logits)))
