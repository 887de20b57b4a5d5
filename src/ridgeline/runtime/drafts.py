"""Keep the inputs of recurrent layers for drafts, until it is known which drafts were accepted.

A recurrent layer's state after a draft is needed only if the draft is accepted, and may take megabytes; the layer's
input for the token is small. So a step leaves the state before its drafts and keeps their inputs; the next step of the
sequence runs the accepted drafts again. See sched/work.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ridgeline.ops import OpsTable, api
from ridgeline.ops.api import Array, Kept
from ridgeline.runtime.layout import Ints, ranges


class DraftInputs:
    """Holds the inputs of every recurrent layer for up to `num_drafts` tokens of each row of the page tables.

    A layer's arrays, [rows * num_drafts, *shape], are allocated at its first draft.
    """

    def __init__(self, rows: int, num_drafts: int, table: OpsTable) -> None:
        self._rows, self.num_drafts, self._table = rows, num_drafts, table
        self._kept: dict[int, list[Array]] = {}

    @property
    def is_allocated(self) -> bool:
        """Return whether a step with drafts has run."""
        return bool(self._kept)

    @property
    def arrays(self) -> list[Array]:
        """Return all arrays; none before the first draft."""
        return [array for arrays in self._kept.values() for array in arrays]

    def indices(self, rows: Ints, counts: Ints) -> Array | None:
        """Return the indices of the first `counts` tokens of each row; None if there are none."""
        if not counts.any():
            return None
        assert counts.max() <= self.num_drafts, "more drafts than num_drafts"
        return self._table.memory.integers(np.repeat(rows * self.num_drafts, counts) + ranges(counts))

    def read(self, layer: int, indices: Array) -> Kept:
        """Return the inputs of some tokens."""
        take = self._table.primitive(api.TAKE)
        return [take(kept, indices) for kept in self._kept[layer]]

    def write(self, layer: int, indices: Array, inputs: Sequence[Array]) -> None:
        """Keep a layer's inputs for some tokens."""
        write = self._table.primitive(api.WRITE_STATE)
        if layer not in self._kept:
            size = self._rows * self.num_drafts
            self._kept[layer] = [self._table.memory.zeros((size, *x.shape[1:])) for x in inputs]
        for kept, x in zip(self._kept[layer], inputs, strict=True):
            write(kept, indices, x)
