"""What recurrent layers were given of drafts, until it is known which of them were accepted.

A recurrent layer's state after a draft is of use only if the draft is accepted, and it may take megabytes; what the
layer was given of the token takes little. So a step leaves the state before its drafts and keeps what the layer was
given of them; the next step of the sequence runs the accepted ones once more. See sched/work.py for when.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ridgeline.ops import OpsTable, api
from ridgeline.ops.api import Array, Kept
from ridgeline.runtime.layout import Ints, ranges


class DraftInputs:
    """Inputs of up to `num_drafts` tokens for each of `max_seqs` rows of the page tables, of every recurrent layer.

    A layer's arrays, [max_seqs * num_drafts, *shape], are made when its first draft comes.
    """

    def __init__(self, max_seqs: int, num_drafts: int, table: OpsTable) -> None:
        self._max_seqs, self._num_drafts, self._table = max_seqs, num_drafts, table
        self._kept: dict[int, list[Array]] = {}

    def places(self, rows: Ints, counts: Ints) -> Array | None:
        """Where the first `counts` tokens of each row lie; None for none at all."""
        if not counts.any():
            return None
        assert counts.max() <= self._num_drafts, "more drafts than there is room for"
        return self._table.memory.integers(np.repeat(rows * self._num_drafts, counts) + ranges(counts))

    def read(self, layer: int, places: Array) -> Kept:
        """What was kept of some tokens."""
        take = self._table.primitive(api.TAKE)
        return [take(kept, places) for kept in self._kept[layer]]

    def write(self, layer: int, places: Array, inputs: Sequence[Array]) -> None:
        """Keep what a layer was given of some tokens."""
        write = self._table.primitive(api.WRITE_STATE)
        if layer not in self._kept:
            size = self._max_seqs * self._num_drafts
            self._kept[layer] = [self._table.memory.zeros((size, *x.shape[1:])) for x in inputs]
        for kept, x in zip(self._kept[layer], inputs, strict=True):
            write(kept, places, x)
