"""Run a pass over whole sequences in which some rows of keys and values stay as an earlier pass computed them.

It defines what a block cache reads (diffusion/denoiser.py), without pages: both passes compute all rows, and the second
one takes the rows outside a part of each sequence from the first. `--cache off` and the measured price use it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ridgeline.nn.step import Stream, WritePages
from ridgeline.ops.api import Array, DenseRows
from ridgeline.runtime.load import LoadedModel
from ridgeline.runtime.step import DenseStep
from ridgeline.spec.storage import KVScales

Rows = dict[int, tuple[Array, ...]]  # the keys and values of each layer


@dataclass(frozen=True)
class KeptStep(DenseStep):
    """A pass that leaves its rows in `rows`; or, if `kept` has indices of tokens, one that reads theirs from there."""

    rows: Rows = field(default_factory=dict)
    kept: Array | None = None

    def append_kv(self, layer: int, write: WritePages, scales: KVScales, *parts: Array) -> DenseRows:
        own = DenseStep.append_kv(self, layer, write, scales, *parts)
        if self.kept is None:
            self.rows[layer] = own.parts
            return own
        both: Any = zip(own.parts, self.rows[layer], strict=True)
        for now, before in both:
            now[self.kept] = before[self.kept]
        return own


def forward_with_kept_rows(
    loaded: LoadedModel, first: Sequence[Sequence[int]], now: Sequence[Sequence[int]], parts: Sequence[range]
) -> Stream:
    """Return the stream of a pass over the sequences `now`, whose rows outside of `parts` are those of `first`.

    parts: the positions of each sequence whose rows are computed from `now`.
    """
    ends = np.cumsum([len(tokens) for tokens in now])
    is_kept = np.ones(int(ends[-1]), bool)
    for end, tokens, part in zip(ends.tolist(), now, parts, strict=True):
        is_kept[end - len(tokens) + part.start : end - len(tokens) + part.stop] = False
    rows = Rows()
    loaded.model.forward(_step(loaded, first, rows, None))
    return loaded.model.forward(_step(loaded, now, rows, loaded.table.memory.integers(np.flatnonzero(is_kept))))


def _step(loaded: LoadedModel, sequences: Sequence[Sequence[int]], rows: Rows, kept: Array | None) -> KeptStep:
    one = loaded.dense_step(sequences)
    return KeptStep(
        one.token_ids, one.positions, one.lengths, one.memory, one.store, one.prompts, rows=rows, kept=kept
    )  # fmt: skip
