"""The two Steps. Dense: whole sequences, no cache; state is returned, not written, so the pass stays differentiable.
Paged: tokens of any sequences, whose state lies in pages that the step writes in place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ridgeline.ops.api import Array, DenseRows, Memory, PagedLayout, PagedRows
from ridgeline.runtime.arena import Arena


@dataclass(frozen=True, slots=True)
class DenseStep:
    """One forward pass over whole sequences of any lengths, laid end to end."""

    token_ids: Array
    positions: Array
    lengths: tuple[int, ...]

    @classmethod
    def build(cls, sequences: Sequence[Sequence[int]], memory: Memory) -> DenseStep:
        """`sequences`: token ids of each, none empty."""
        lengths = tuple(len(s) for s in sequences)
        tokens = np.fromiter((t for s in sequences for t in s), np.int64, sum(lengths))
        positions = np.concatenate([np.arange(n) for n in lengths])
        return cls(memory.integers(tokens), memory.integers(positions), lengths)

    def last_rows(self, memory: Memory) -> Array:
        """The row of each sequence's last token."""
        return memory.integers(np.cumsum(self.lengths) - 1)

    def extend(self, layer: int, *parts: Array) -> DenseRows:
        return DenseRows(parts, self.lengths)


@dataclass(frozen=True, slots=True)
class PagedStep:
    """One forward pass over slices of sequences: prefill chunks, decodes, drafts alike.

    layouts: one per state group of the arena.
    """

    token_ids: Array
    positions: Array
    layouts: Sequence[PagedLayout]
    arena: Arena
    write: Callable[[Array, Array, Array, Array], None]

    def extend(self, layer: int, *parts: Array) -> PagedRows:
        group, views = self.arena.layer(layer)
        layout = self.layouts[group]
        for view, part in zip(views, parts, strict=True):
            self.write(view, part, layout.write_pages, layout.write_slots)
        return PagedRows(views, layout)
