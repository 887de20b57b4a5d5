"""Decode steps that are recorded once and run again: on a GPU CUDA graphs, on a CPU a list of kernels' calls.

A step of n sequences, one token each, differs from the next such step only in what stands in a few arrays: the tokens'
embeddings and rotations, and where their pages are. So it is recorded over arrays that stay, which are filled before
each run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ridgeline.nn.model import Model
from ridgeline.nn.step import Stream
from ridgeline.ops import OpsTable
from ridgeline.ops.api import Array, Buckets, PagedLayout, Recorder, Rotary
from ridgeline.runtime.arena import Arena
from ridgeline.runtime.drafts import DraftInputs
from ridgeline.runtime.layout import Ints, Slices
from ridgeline.runtime.step import PagedStep
from ridgeline.spec import Rope
from ridgeline.spec.groups import StateGroup

MOST_SEQUENCES = 64  # of a step that is recorded: beyond, what is saved is nothing beside the kernels


@dataclass(frozen=True, slots=True)
class StepInputs:
    """What differs from step to step. layouts: of each state group; all share `starts` and `lengths`, which are 1."""

    x: Array
    rotaries: Mapping[Rope, Rotary]
    layouts: Sequence[PagedLayout]

    @classmethod
    def make(cls, recorder: Recorder, model: Model, widths: Sequence[int], n: int) -> StepInputs:
        """Of n sequences. widths: of each group's page table."""

        def integers(*shape: int) -> Array:
            return recorder.input(shape, integers=True)

        starts, lengths = integers(n), integers(n)
        recorder.assign(lengths, np.ones(n, np.int64))
        return cls(
            recorder.input((n, model.spec.hidden_size)),
            {r: Rotary(*(recorder.input((n, r.dim // 2)) for _ in range(2))) for r in model.spec.ropes()},
            [PagedLayout(integers(n), integers(n), starts, lengths, integers(n, w), _no_buckets) for w in widths],
        )

    def first(self, recorder: Recorder, n: int) -> StepInputs:
        """Those of the first n sequences, sharing memory."""

        def cut(layout: PagedLayout) -> PagedLayout:
            arrays = layout.write_pages, layout.write_slots, layout.starts, layout.lengths, layout.tables
            return PagedLayout(*(recorder.first(x, n) for x in arrays), _no_buckets)

        rotaries = {rope: Rotary(*(recorder.first(x, n) for x in both)) for rope, both in self.rotaries.items()}
        return StepInputs(recorder.first(self.x, n), rotaries, [cut(layout) for layout in self.layouts])


@dataclass(frozen=True, slots=True)
class _Graph:
    """A recorded step. stream: what it makes."""

    inputs: StepInputs
    stream: Stream
    run: Callable[[], None]


class DecodeGraphs:
    """The decode steps of one engine, recorded once for each number of sequences. refusal: why none is, or None."""

    def __init__(
        self, model: Model, table: OpsTable, groups: Sequence[StateGroup], arena: Arena, drafts: DraftInputs,
        page_tables: Sequence[Ints],
    ) -> None:  # fmt: skip
        self._model, self._table, self._groups, self._page_tables = model, table, groups, page_tables
        self._arena, self._drafts = arena, drafts
        self._graphs: dict[int, _Graph] = {}
        self.refusal: str | None = None
        if table.driver is None:
            self.refusal = f"device {table.memory.device} records nothing"
        elif any(group.snapshot for group in groups):
            self.refusal = "the model has recurrent layers, whose states are not recorded"
        else:
            self._recorder = table.driver.recorder()
            widths = [page_table.shape[1] for page_table in page_tables]
            most = min(len(page_tables[0]), MOST_SEQUENCES)
            self._inputs = StepInputs.make(self._recorder, model, widths, most)

    def run(self, slices: Slices, tokens: Ints) -> Stream | None:
        """A step of one token for each sequence, no draft among them; None if it must run unrecorded.

        The stream is to be read before the next step.
        """
        n = tokens.size
        if self.refusal is not None or n > MOST_SEQUENCES:
            return None
        graph = self._graphs.get(n)
        inputs = graph.inputs if graph else self._inputs.first(self._recorder, n)
        step = self._fill(inputs, slices, tokens)
        if graph is None:
            return self._record(inputs, step, n)
        graph.run()
        return graph.stream

    def _fill(self, inputs: StepInputs, slices: Slices, tokens: Ints) -> PagedStep:
        starts, rows, assign, memory = slices.starts, slices.rows, self._recorder.assign, self._table.memory
        step = PagedStep(
            memory.integers(tokens), memory.integers(starts), slices, inputs.layouts, self._arena, self._drafts,
            self._table,
        )  # fmt: skip
        assign(inputs.x, self._model.embed(step))
        for rope, made in self._model.rotaries(step.positions).items():
            for mine, its in zip(inputs.rotaries[rope], made, strict=True):
                assign(mine, its)
        assign(inputs.layouts[0].starts, step.positions)
        for group, layout, page_table in zip(self._groups, inputs.layouts, self._page_tables, strict=True):
            index = starts // group.page_tokens
            assign(layout.write_pages, memory.integers(page_table[rows, index]))
            assign(layout.write_slots, memory.integers(starts - index * group.page_tokens))
            assign(layout.tables, memory.integers(page_table[rows, : int(index.max()) + 1]))
        return step

    def _record(self, inputs: StepInputs, step: PagedStep, n: int) -> Stream | None:
        def work() -> Sequence[Array]:
            residual, delta, _ = self._model.run_blocks(inputs.x, inputs.rotaries, step)
            return (residual,) if delta is None else (residual, delta)

        vectors = [x for x in self._model.weights.values() if len(x.shape) == 1]
        found = self._recorder.record(work, [*self._arena.pages, *vectors])
        if isinstance(found, str):
            self.refusal = found
            return None
        residual, *delta = found.results
        stream = Stream(residual, delta[0] if delta else None)
        self._graphs[n] = _Graph(inputs, stream, found.run)
        return stream


def _no_buckets() -> Buckets:
    raise NotImplementedError("recorded kernels walk through page tables")
