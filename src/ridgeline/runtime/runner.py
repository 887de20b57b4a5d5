"""Runs StepPlans on one device: whole-page moves, page tables, the forward pass, and the logits that are sampled."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ridgeline.nn.model import Model
from ridgeline.nn.step import Stream
from ridgeline.ops.api import Memory, PagedLayout, SnapshotLayout
from ridgeline.runtime.arena import Arena
from ridgeline.runtime.drafts import DraftInputs
from ridgeline.runtime.graphs import Decoded, DecodeGraphs
from ridgeline.runtime.layout import Ints, Slices, build_layout, build_snapshot_layout
from ridgeline.runtime.load import LoadedModel
from ridgeline.runtime.step import DenseStep, PagedStep
from ridgeline.sample.sampler import Best
from ridgeline.sched.work import LAST, PageCopy, StepPlan, Work
from ridgeline.spec.groups import NULL_PAGE, StateGroup

Floats = np.ndarray[Any, np.dtype[np.float32]]
PROBE_TOKENS, PROBE_BYTES = 32, 2**22  # of a prompt, and of pages, that are timed to learn what preemption costs


@dataclass(frozen=True, slots=True)
class Forward:
    """A step that was submitted: the tokens of its works, one after the other, up to the head. To be asked before the
    next one is submitted. decoded: where the step ran up to its best tokens.
    """

    model: Model
    stream: Stream
    memory: Memory
    decoded: Decoded | None = None

    def logits(self, rows: Ints | None = None) -> Floats:
        """Logits [n, vocabulary] of n of the step's tokens (None: of all)."""
        if rows is None and self.decoded is not None:
            return self.memory.get(self.decoded.logits)
        return self.memory.get(self.model.logits(self.stream, None if rows is None else self.memory.integers(rows)))

    def best(self) -> Best | None:
        """The best token of each row of all logits, where that is known already."""
        if self.decoded is None:
            return None
        return Best(np.asarray(self.decoded.best), np.asarray(self.decoded.best_logits))


class Runner:
    """One device. Steps run in the order of submission; a token of LAST is what `sampled` said of its row.

    num_pages, num_host_pages: per group, the null page included. max_seqs: rows of the page tables. max_model_len:
    tokens of the longest sequence. num_drafts: of a work at most.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        groups: Sequence[StateGroup],
        num_pages: Sequence[int],
        *,
        max_seqs: int,
        max_model_len: int,
        num_host_pages: Sequence[int],
        num_drafts: int = 0,
    ) -> None:
        self._model, self._memory, self._groups = loaded.model, loaded.table.memory, groups
        self._table = loaded.table
        self.arena = Arena(groups, num_pages, num_host_pages, self._memory)
        self._tables: list[Ints] = [np.zeros((max_seqs, group.num_pages(max_model_len)), np.int64) for group in groups]
        self._vocab_size, self._max_model_len = loaded.spec.vocab_size, max_model_len
        self._num_host_pages = num_host_pages[0]
        self._last = np.zeros(max_seqs, np.int64)
        self._inputs = DraftInputs(max_seqs, num_drafts, loaded.table)
        self.graphs = DecodeGraphs(loaded.model, loaded.table, groups, self.arena, self._inputs, self._tables)

    def submit(self, plan: StepPlan) -> Forward | None:
        """Run a step; None if it only moves pages."""
        if plan.copies or plan.swap_out or plan.swap_in:
            self._move(plan)
        for work in plan.works:
            for group, row, first, pages in work.deltas:
                self._tables[group][row, first : first + len(pages)] = pages
                self.arena.handed_out(group, pages)
        if not plan.works:
            return None
        decoded = self._decode(plan.works)
        if decoded is not None:
            return Forward(self._model, decoded.stream, self._memory, decoded)
        return Forward(self._model, self._model.forward(self._step(plan.works)), self._memory)

    def _decode(self, works: Sequence[Work]) -> Decoded | None:
        """The step by its recording, if it is one token for each sequence."""
        for work in works:
            if len(work.tokens) != 1:
                return None
        last = self._last
        tokens = [work.tokens[0] if work.tokens[0] != LAST else int(last[work.row]) for work in works]
        positions = [work.start for work in works]
        rows = None
        if (tables := self._model.frequency_tables) is not None:
            rows = tables.rows(np.array([work.floor for work in works]), np.array(positions)).tolist()
        return self.graphs.run([work.row for work in works], tokens, positions, rows)

    def sampled(self, row: int, token: int) -> None:
        """What a row of the tables sampled in its last step."""
        self._last[row] = token

    def preemption_rates(self) -> tuple[float, float]:
        """Seconds to compute a token of a prompt again, and to copy a byte of pages one way, measured on this device.

        No page with anything in it is touched: the prompt is computed without pages, and what is copied, out to the
        host and back, is the null page, many times over. Needs host pages.
        """
        count = min(PROBE_TOKENS, self._max_model_len)
        prompt = DenseStep.build([[i % self._vocab_size for i in range(count)]], self._memory)
        last = prompt.last_rows(self._memory)
        page_bytes = self._groups[0].page_bytes
        pages = [NULL_PAGE] * min(self._num_host_pages, -(-PROBE_BYTES // page_bytes))

        def move() -> None:
            self.arena.swap_in(0, pages, pages)
            self.arena.swap_out(0, pages, pages)  # waits for the other one too

        computed = _seconds(lambda: self._memory.get(self._model(prompt, last)))
        moved = _seconds(move)
        return computed / count, moved / (2 * len(pages) * page_bytes)

    def _step(self, works: Sequence[Work]) -> PagedStep:
        slices = Slices(
            np.array([w.row for w in works]),
            np.array([w.start for w in works]),
            np.array([len(w.tokens) for w in works]),
            np.array([w.num_draft for w in works]),
            np.array([w.start - w.replay_from for w in works]),
            np.array([w.floor for w in works]) if self._model.frequency_tables else np.zeros(len(works), np.int64),
        )
        tokens = np.fromiter((t for w in works for t in w.tokens), np.int64, int(slices.lengths.sum()))
        tokens = np.where(tokens == LAST, np.repeat(self._last[slices.rows], slices.lengths), tokens)
        return PagedStep(
            self._memory.integers(tokens),
            self._memory.integers(slices.positions()),
            slices,
            [self._layout(slices, group, table) for group, table in zip(self._groups, self._tables, strict=True)],
            self.arena,
            self._inputs,
            self._table,
        )

    def _layout(self, slices: Slices, group: StateGroup, table: Ints) -> PagedLayout | SnapshotLayout:
        if group.snapshot:
            return build_snapshot_layout(slices, table, group.page_tokens, self._memory)
        return build_layout(slices, table, group.page_tokens, group.lookback, self._memory, group.first_tokens)

    def _move(self, plan: StepPlan) -> None:
        """Whole pages, in the order that plans promise: out to the host, in from it, copies on the device."""
        for group, source, target in _by_group(plan.swap_out):
            self.arena.swap_out(group, source, target)
        for group, source, target in _by_group(plan.swap_in):
            self.arena.swap_in(group, source, target)
        for group, source, target in _by_group(plan.copies):
            self.arena.copy(group, source, target)


def _by_group(copies: Sequence[PageCopy]) -> list[tuple[int, list[int], list[int]]]:
    moves: dict[int, tuple[list[int], list[int]]] = {}
    for copy in copies:
        source, target = moves.setdefault(copy.group, ([], []))
        source.append(copy.src)
        target.append(copy.dst)
    return [(group, *move) for group, move in moves.items()]


def _seconds(run: Callable[[], object]) -> float:
    """The least of a few runs, because all that disturbs a run makes it longer; the first one loads kernels."""
    times: list[float] = []
    while len(times) < 2 or (len(times) < 5 and sum(times) < 1):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)
