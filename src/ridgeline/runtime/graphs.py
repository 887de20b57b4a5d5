"""Record decode steps once and run them again: on a GPU as CUDA graphs, on a CPU as a list of kernel calls.

A step of n sequences, one token each, differs from the next one only in its tokens, their positions, and the contents
of the page tables. So it is recorded over arrays at fixed addresses, which are filled before each run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from ridgeline.nn.model import Model
from ridgeline.nn.step import Stream
from ridgeline.ops import OpsTable, api
from ridgeline.ops.api import Array, Buckets, PagedLayout
from ridgeline.runtime.arena import Layers
from ridgeline.runtime.drafts import DraftInputs
from ridgeline.runtime.layout import Ints, Slices
from ridgeline.runtime.step import PagedStep
from ridgeline.spec.groups import StateGroup

MOST_SEQUENCES = 32  # largest recorded step: with more sequences, a recording saves a small share of the time


class Decoded(NamedTuple):
    """Results of a recorded step of n sequences, valid until the next one: logits [n, vocabulary], the best token of
    each row and its logit [n], and the residual stream.
    """

    logits: Array
    best: Array
    best_logits: Array
    stream: Stream


class _Graph(NamedTuple):
    """A recorded step, and its input arrays [n]."""

    rows: Array
    tokens: Array
    positions: Array
    frequency_rows: Array
    made: Decoded
    run: Callable[[], None]


class DecodeGraphs:
    """Holds the recorded decode steps of one engine, one for each number of sequences. refusal: why there are none."""

    def __init__(
        self, model: Model, table: OpsTable, groups: Sequence[StateGroup], arena: Layers, drafts: DraftInputs,
        page_tables: Sequence[Ints],
    ) -> None:  # fmt: skip
        self._model, self._table, self._groups, self._page_tables = model, table, groups, page_tables
        self._arena, self._drafts = arena, drafts
        self._layout, self._best = table.primitive(api.DECODE_LAYOUT), table.primitive(api.BEST)
        self._graphs: dict[int, _Graph] = {}
        self.refusal = _refusal(table, groups)
        if self.refusal is None and table.driver is not None:
            self._recorder = table.driver.recorder()
            most = min(len(page_tables[0]), MOST_SEQUENCES)
            self._inputs = [self._recorder.input(most) for _ in range(5)]
            self._recorder.assign(self._inputs[3], [1] * most)
            self._known = [*arena.pages, *page_tables, *model.constants()]

    def run(
        self, rows: Sequence[int], tokens: Sequence[int], positions: Sequence[int],
        frequency_rows: Sequence[int] | None = None,
    ) -> Decoded | None:  # fmt: skip
        """Run one token of each sequence, none of them a draft; None if the step must run unrecorded."""
        n = len(rows)
        if self.refusal is not None or n > MOST_SEQUENCES:
            return None
        graph = self._graphs.get(n)
        if graph is None:
            return self._record(rows, tokens, positions, frequency_rows or [0] * n)
        assign = self._recorder.assign
        assign(graph.rows, rows), assign(graph.tokens, tokens), assign(graph.positions, positions)
        if frequency_rows is not None:
            assign(graph.frequency_rows, frequency_rows)
        graph.run()
        return graph.made

    def _record(
        self, rows: Sequence[int], tokens: Sequence[int], positions: Sequence[int], frequency_rows: Sequence[int]
    ) -> Decoded | None:
        inputs = [self._recorder.first(x, len(rows)) for x in self._inputs]
        begin = inputs[0], inputs[1], inputs[2], inputs[4]
        for array, values in zip(begin, (rows, tokens, positions, frequency_rows), strict=True):
            self._recorder.assign(array, values)
        slices = Slices.plain(np.array(rows), np.array(positions), np.ones(len(rows), np.int64))
        try:
            found = self._recorder.record(lambda: self._step(slices, *inputs), self._known)
        except _AsksForBucketsError:  # the step runs again unrecorded and writes the same values to pages
            found = "attention gathers what the pages of a step hold"
        if isinstance(found, str):
            left = sorted({c.op for c in self._table.choices() if c.refusals and c.level == "primitive"})
            self.refusal = f"{found}; served beside the best kernels: {', '.join(left) or 'nothing'}"
            return None
        logits, best, best_logits, residual, *delta = found.results
        made = Decoded(logits, best, best_logits, Stream(residual, delta[0] if delta else None))
        self._graphs[len(rows)] = _Graph(*begin, made, found.run)
        return made

    def _step(
        self, slices: Slices, rows: Array, tokens: Array, positions: Array, ones: Array, frequency_rows: Array
    ) -> Sequence[Array]:
        layouts = []
        for group, page_table in zip(self._groups, self._page_tables, strict=True):
            pages, slots, tables = self._layout(page_table, rows, positions, group.page_tokens)
            layouts.append(PagedLayout(pages, slots, positions, ones, tables, _no_buckets))
        step = PagedStep(tokens, positions, slices, layouts, self._arena, self._drafts, self._table, frequency_rows)
        stream = self._model.forward(step)
        logits = self._model.logits(stream)
        made = (logits, *self._best(logits), stream.residual)
        return made if stream.delta is None else (*made, stream.delta)


def _refusal(table: OpsTable, groups: Sequence[StateGroup]) -> str | None:
    if table.driver is None:
        return f"device {table.memory.device} records nothing"
    if any(group.snapshot for group in groups):
        return "the model has recurrent layers, whose states are not recorded"
    return None


class _AsksForBucketsError(Exception):
    """A kernel needs the buckets of a step, which a recorded step does not have: they change from step to step."""


def _no_buckets() -> Buckets:
    raise _AsksForBucketsError
