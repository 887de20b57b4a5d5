"""The two Steps: how layers read and write state.

A DenseStep runs whole sequences without a cache. It returns state instead of writing it, so the pass stays
differentiable. A PagedStep runs tokens of any sequences and writes their state into pages in place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ridgeline.nn.rotary import FrequencyTables
from ridgeline.nn.step import WritePages
from ridgeline.ops import OpsTable, api
from ridgeline.ops.api import (
    Array,
    DenseRows,
    Kept,
    Memory,
    PagedLayout,
    PagedRows,
    PageTarget,
    Segments,
    SnapshotLayout,
    States,
)
from ridgeline.runtime.arena import Layers
from ridgeline.runtime.drafts import DraftInputs
from ridgeline.runtime.layout import Slices, build_segments, ranges
from ridgeline.spec.storage import KVScales

StoreRows = Callable[[Array, float], Array]  # ops.api.STORE_ROWS


@dataclass(frozen=True)
class DenseStep:
    """One forward pass over whole sequences of any lengths, laid end to end.

    store: rounds keys and values as pages would; None if pages hold them as they are computed. prompts: tokens of the
    prompt in each sequence; None: all of them. token_types: the type of each token; None: all are 0.
    """

    token_ids: Array
    positions: Array
    lengths: tuple[int, ...]
    memory: Memory
    store: StoreRows | None = None
    prompts: tuple[int, ...] | None = None
    token_types: Array | None = None
    signal: None = None
    adapters: None = None

    @classmethod
    def build(
        cls, sequences: Sequence[Sequence[int]], memory: Memory, store: StoreRows | None = None,
        prompts: Sequence[int] | None = None, types: Sequence[Sequence[int]] | None = None,
    ) -> DenseStep:  # fmt: skip
        """Return the step for sequences of token ids; none may be empty. types: the type of each token."""
        lengths = tuple(len(s) for s in sequences)
        tokens = np.fromiter((t for s in sequences for t in s), np.int64, sum(lengths))
        positions = np.concatenate([np.arange(n) for n in lengths])
        counts = None if prompts is None else tuple(prompts)
        kinds = None if types is None else memory.integers(np.concatenate([np.asarray(t, np.int64) for t in types]))
        return cls(memory.integers(tokens), memory.integers(positions), lengths, memory, store, counts, kinds)

    @cached_property
    def segments(self) -> Segments:
        lengths = np.array(self.lengths)
        rows = np.arange(lengths.size)
        return build_segments(Slices.plain(rows, np.zeros_like(rows), lengths), self.memory)

    def frequency_rows(self, tables: FrequencyTables) -> Array:
        prompts = self.lengths if self.prompts is None else self.prompts
        floors = [tables.regimes.floor(*counts) for counts in zip(prompts, self.lengths, strict=True)]
        lengths = np.array(self.lengths)
        return self.memory.integers(tables.rows(np.repeat(floors, lengths), ranges(lengths)))

    def read_state(self, layer: int, parts: Sequence[tuple[int, ...]]) -> tuple[States, Kept]:
        return [self.memory.zeros((len(self.lengths), *shape)) for shape in parts], ()

    def write_state(self, layer: int, states: States, keep: Kept) -> None:
        """Keep nothing: no later step continues these sequences."""

    def last_rows(self, memory: Memory) -> Array:
        """Return the index of each sequence's last token among the step's tokens."""
        return memory.integers(np.cumsum(self.lengths) - 1)

    def target(self, layer: int, scales: KVScales) -> None:
        """Return None: there are no pages."""

    def append_kv(self, layer: int, write: WritePages, scales: KVScales, *parts: Array) -> DenseRows:
        if self.store:
            parts = tuple(self.store(x, scales[i]) for i, x in enumerate(parts))
        return DenseRows(parts, self.lengths, scales)


@dataclass(frozen=True)
class PagedStep:
    """One forward pass over slices of sequences: prefill chunks, decodes, drafts alike.

    layouts: one per state group of the arena. inputs: recurrent layers' inputs for drafts, of this step and before.
    recorded_rows, recorded_segments: frequency rows and segments of a recorded step; None: they follow from the slices.
    recorded_kept: where a recorded step finds inputs of accepted drafts, and keeps those of its drafts, if it has any.
    signal: the mean embedding of each token's last prediction, in a pass over canvases. adapters: the slot of each
    token's adapter, -1 for none; None if no token has one.
    """

    token_ids: Array
    positions: Array
    slices: Slices
    layouts: Sequence[PagedLayout | SnapshotLayout]
    arena: Layers
    inputs: DraftInputs
    table: OpsTable
    recorded_rows: Array | None = None
    recorded_segments: Segments | None = None
    recorded_kept: tuple[Array, Array | None] | None = None
    signal: Array | None = None
    adapters: Array | None = None

    @property
    def token_types(self) -> None:
        """Return None: models with pages have no types of tokens."""

    @cached_property
    def segments(self) -> Segments:
        if self.recorded_segments is not None:
            return self.recorded_segments
        return build_segments(self.slices, self.table.memory)

    def frequency_rows(self, tables: FrequencyTables) -> Array:
        if self.recorded_rows is not None:
            return self.recorded_rows
        slices = self.slices
        return self.table.memory.integers(tables.rows(np.repeat(slices.floors, slices.lengths), slices.positions()))

    def read_state(self, layer: int, parts: Sequence[tuple[int, ...]]) -> tuple[States, Kept]:
        group, views = self.arena.layer(layer)
        layout = self.layouts[group]
        assert isinstance(layout, SnapshotLayout)
        read = self.table.primitive(api.READ_STATE)
        kept = self.inputs.read(layer, self._replayed) if self._replayed is not None else ()
        return [read(view, layout.read, layout.fresh, layout.write) for view in views], kept

    def write_state(self, layer: int, states: States, keep: Kept) -> None:
        group, views = self.arena.layer(layer)
        layout = self.layouts[group]
        assert isinstance(layout, SnapshotLayout)
        write = self.table.primitive(api.WRITE_STATE)
        for view, state in zip(views, states, strict=True):
            write(view, layout.write, state)
        if self._drafted is not None:
            self.inputs.write(layer, self._drafted, keep)

    @cached_property
    def _replayed(self) -> Array | None:
        if self.recorded_kept is not None:
            return self.recorded_kept[0]
        return self.inputs.indices(self.slices.rows, self.slices.replays)

    @cached_property
    def _drafted(self) -> Array | None:
        if self.recorded_kept is not None:
            return self.recorded_kept[1]
        return self.inputs.indices(self.slices.rows, self.slices.drafts)

    def target(self, layer: int, scales: KVScales) -> PageTarget:
        views, layout = self._pages(layer)
        return PageTarget(views, layout.write_pages, layout.write_slots, scales)

    def append_kv(self, layer: int, write: WritePages, scales: KVScales, *parts: Array) -> PagedRows:
        views, layout = self._pages(layer)
        if parts:
            write(views, parts, layout.write_pages, layout.write_slots, scales)
        return PagedRows(views, layout, scales)

    def _pages(self, layer: int) -> tuple[tuple[Array, ...], PagedLayout]:
        group, views = self.arena.layer(layer)
        layout = self.layouts[group]
        assert isinstance(layout, PagedLayout)
        return views, layout
