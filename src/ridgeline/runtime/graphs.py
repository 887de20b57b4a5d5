"""Record decode steps once and run them again: on a GPU as CUDA graphs, on a CPU as a list of kernel calls.

A step of n sequences computes T tokens: the next one of each sequence, and perhaps drafts. Another step with the same
n and T differs only in the tokens, their positions, how many of them each sequence has, and the contents of the page
tables. So it is recorded over arrays at fixed addresses, which are filled before each run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
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

# Largest recorded step: with more sequences or tokens, a recording saves a small share of the time.
MOST_SEQUENCES, MOST_TOKENS = 32, 72
MOST_GRAPHS = 64  # recordings that are kept; the one that was not used for the longest time is dropped


class Decoded(NamedTuple):
    """Results of a recorded step of T tokens, valid until the next one: logits [T, vocabulary], the best token of each
    row and its logit [T], and the residual stream.
    """

    logits: Array
    best: Array
    best_logits: Array
    stream: Stream


class _Inputs(NamedTuple):
    """Arrays that a recorded step reads: of its tokens [T], and of its sequences [n].

    starts: position of each sequence's first token. last: index of its last token among the T tokens. A step of one
    token each has its positions as `starts`, and the other two never change.
    """

    rows: Array
    tokens: Array
    positions: Array
    frequency_rows: Array
    starts: Array
    lengths: Array
    last: Array


class _Graph(NamedTuple):
    """A recorded step."""

    inputs: _Inputs
    made: Decoded
    run: Callable[[], None]


class DecodeGraphs:
    """Holds recorded decode steps of one engine, by their numbers of sequences and tokens.

    refusal: why there are none.
    """

    def __init__(
        self, model: Model, table: OpsTable, groups: Sequence[StateGroup], arena: Layers, drafts: DraftInputs,
        page_tables: Sequence[Ints],
    ) -> None:  # fmt: skip
        self._model, self._table, self._groups, self._page_tables = model, table, groups, page_tables
        self._arena, self._drafts = arena, drafts
        self._layout, self._best = table.primitive(api.DECODE_LAYOUT), table.primitive(api.BEST)
        self._graphs: dict[tuple[int, int], _Graph] = {}
        self.refusal = _refusal(table, groups)
        if self.refusal is None and table.driver is not None:
            self._recorder = table.driver.recorder()
            most = min(len(page_tables[0]), MOST_SEQUENCES)
            of_tokens = [self._recorder.input(MOST_TOKENS) for _ in range(4)]
            self._inputs = _Inputs(*of_tokens, *(self._recorder.input(most) for _ in range(3)))
            self._single = self._recorder.input(most), self._recorder.input(most)
            self._recorder.assign(self._single[0], [1] * most)
            self._recorder.assign(self._single[1], range(most))
            self._known = [*arena.pages, *page_tables, *model.constants()]

    def run(
        self, rows: Sequence[int], starts: Sequence[int], lengths: Sequence[int], tokens: Sequence[int],
        frequency_rows: Sequence[int] | None = None,
    ) -> Decoded | None:  # fmt: skip
        """Run the next tokens of n sequences, with their drafts; None if the step must run unrecorded.

        rows, starts, lengths: each sequence's row of the page tables, first position and number of tokens.
        tokens, frequency_rows: ids and frequency rows of all tokens, one sequence after the other.
        """
        n, total = len(rows), len(tokens)
        if self.refusal is not None or n > MOST_SEQUENCES or total > MOST_TOKENS:
            return None
        graph = self._graphs.pop((n, total), None)
        if graph is None:
            return self._record(rows, starts, lengths, tokens, frequency_rows or [0] * total)
        self._graphs[n, total] = graph  # the last of the dict is the one that was used last
        self._fill(graph.inputs, rows, starts, lengths, tokens, frequency_rows)
        graph.run()
        return graph.made

    def _fill(
        self, inputs: _Inputs, rows: Sequence[int], starts: Sequence[int], lengths: Sequence[int],
        tokens: Sequence[int], frequency_rows: Sequence[int] | None,
    ) -> None:  # fmt: skip
        assign = self._recorder.assign
        positions = starts
        if len(tokens) > len(rows):
            assign(inputs.starts, starts), assign(inputs.lengths, lengths)
            assign(inputs.last, [end - 1 for end in accumulate(lengths)])
            rows = [row for row, count in zip(rows, lengths, strict=True) for _ in range(count)]
            positions = [first + i for first, count in zip(starts, lengths, strict=True) for i in range(count)]
        assign(inputs.rows, rows), assign(inputs.tokens, tokens), assign(inputs.positions, positions)
        if frequency_rows is not None:
            assign(inputs.frequency_rows, frequency_rows)

    def _record(
        self, rows: Sequence[int], starts: Sequence[int], lengths: Sequence[int], tokens: Sequence[int],
        frequency_rows: Sequence[int],
    ) -> Decoded | None:  # fmt: skip
        n, total = len(rows), len(tokens)
        of_tokens = [self._recorder.first(x, total) for x in self._inputs[:4]]
        of_sequences = self._inputs[4:] if total > n else (self._inputs.positions, *self._single)
        inputs = _Inputs(*of_tokens, *(self._recorder.first(x, n) for x in of_sequences))
        self._fill(inputs, rows, starts, lengths, tokens, frequency_rows)
        slices = Slices.plain(np.array(rows), np.array(starts), np.array(lengths))
        try:
            found = self._recorder.record(lambda: self._step(slices, inputs), self._known)
        except _AsksForBucketsError:  # the step runs again unrecorded and writes the same values to pages
            found = "attention gathers what the pages of a step hold"
        if isinstance(found, str):
            left = sorted({c.op for c in self._table.choices() if c.refusals and c.level == "primitive"})
            self.refusal = f"{found}; served beside the best kernels: {', '.join(left) or 'nothing'}"
            return None
        logits, best, best_logits, residual, *delta = found.results
        made = Decoded(logits, best, best_logits, Stream(residual, delta[0] if delta else None))
        if len(self._graphs) >= MOST_GRAPHS:
            del self._graphs[next(iter(self._graphs))]
        self._graphs[n, total] = _Graph(inputs, made, found.run)
        return made

    def _step(self, slices: Slices, inputs: _Inputs) -> Sequence[Array]:
        rows, tokens, positions, frequency_rows, starts, lengths, last = inputs
        layouts = []
        for group, page_table in zip(self._groups, self._page_tables, strict=True):
            pages, slots, tables = self._layout(page_table, rows, positions, last, group.page_tokens)
            layouts.append(PagedLayout(pages, slots, starts, lengths, tables, _no_buckets))
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
