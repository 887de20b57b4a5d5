"""Batches of packed token rows. A step's batch follows from (seed, step) alone, so that training resumes exactly.

In each epoch the documents are shuffled and laid end to end; the epochs follow each other in one endless stream of
tokens. The stream is cut into rows of `context` tokens. The rows that begin in an epoch are shuffled too, because rows
of one long document would follow each other otherwise. A batch is the next few rows. So every token of every epoch is
used exactly once, and all batches have the same size: the last row of an epoch continues into the next epoch.

Attention never crosses from one document to another. The part of a document that is in a row is a segment: a sequence
with positions from 0. If a row cuts a document, the rest begins in another row, without the tokens before it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from ridgeline.errors import RequestError
from ridgeline.train.data.shards import Shard

Ints = np.ndarray[Any, np.dtype[np.int64]]
NO_TARGET = -1
_DOCUMENTS, _ROWS = 0, 1  # separate random permutations for documents and for rows
_EPOCHS_KEPT = 3  # a batch can begin in one epoch and end in the next, and its last row in the one after


@dataclass(frozen=True, slots=True)
class Batch:
    """Segments laid end to end, as in runtime.step.DenseStep. All arrays are int64 [num_tokens].

    targets: the token that follows each token in its document, even if that is in another row; NO_TARGET for the last
    token of a document. positions: position of each token in its segment. lengths: number of tokens of each segment.
    """

    token_ids: Ints
    targets: Ints
    positions: Ints
    lengths: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Epoch:
    """The layout of an epoch. documents [D]: their order. starts [D + 1]: the epoch's token index where each begins.
    rows: the order of the rows.
    """

    documents: Ints
    starts: Ints
    first_row: int
    rows: Ints


class Batches:
    """The batches of a shard in an order that follows from `seed`, or one rank's part of them.

    Memory: 8 bytes per row and 16 per document, for up to three epochs. Instances can be shared between threads.
    """

    def __init__(
        self, shard: Shard, context: int, batch_tokens: int, seed: int = 0, *, rank: int = 0, world_size: int = 1
    ) -> None:
        """context: tokens of a row. batch_tokens: tokens of the batch of all ranks together.

        Raises RequestError if one of them is not positive, if the batch is not a whole number of rows for each rank,
        and if the seed does not fit into a uint64.
        """
        if context < 1 or batch_tokens < 1:
            raise RequestError(f"context is {context} and batch_tokens {batch_tokens}; both must be at least 1")
        if batch_tokens % (context * world_size):
            raise RequestError(
                f"a batch of {batch_tokens} tokens is not a whole number of rows of {context} tokens for each of "
                f"{world_size} ranks; use a multiple of {context * world_size}"
            )
        if not 0 <= seed < 1 << 64:
            raise RequestError(f"the seed is {seed}; it must be from 0 to {(1 << 64) - 1}")
        if not 0 <= rank < world_size:
            raise ValueError(f"rank is {rank}; it must be from 0 to {world_size - 1}")
        self._tokens, self._offsets, self._seed = shard.tokens, shard.offsets, seed
        self._lengths: Ints = np.diff(shard.offsets)
        self._context, self._rows_per_batch = context, batch_tokens // context
        self._num_rows = self._rows_per_batch // world_size
        self._first_row = rank * self._num_rows
        self._epoch: Callable[[int], _Epoch] = lru_cache(_EPOCHS_KEPT)(self._lay_out)

    def batch(self, step: int) -> Batch:
        """Return the batch of a step, counted from 0. It does not depend on earlier calls."""
        return self._batch(self._rows(step))

    def micro_batches(self, step: int, micro_tokens: int) -> list[Batch]:
        """Return the batch of a step in parts of `micro_tokens` tokens. Raises RequestError if these do not divide it
        into rows.

        Parts may have different numbers of targets: divide the sum of their losses by the total number of targets.
        """
        if micro_tokens < 1 or micro_tokens % self._context or self._num_rows * self._context % micro_tokens:
            raise RequestError(
                f"micro-batches of {micro_tokens} tokens do not divide {self._num_rows} rows of {self._context}; use a "
                f"multiple of {self._context} that does"
            )
        rows = self._rows(step)
        return [self._batch(part) for part in np.split(rows, len(rows) * self._context // micro_tokens)]

    def _rows(self, step: int) -> Ints:
        """Return the numbers of this rank's rows in a step."""
        if step < 0:
            raise ValueError(f"step is {step}; the first is 0")
        first = step * self._rows_per_batch + self._first_row
        return self._shuffled(np.arange(first, first + self._num_rows))

    def _batch(self, rows: Ints) -> Batch:
        indices = rows[:, None] * self._context + np.arange(self._context)
        sources, begins, ends = self._look_up(indices.ravel())
        begins[:: self._context] = True  # a row always begins a new segment
        following = self._tokens[np.minimum(sources + 1, len(self._tokens) - 1)].astype(np.int64)
        segments = np.flatnonzero(begins)
        lengths = np.diff(segments, append=len(begins))
        return Batch(
            token_ids=self._tokens[sources].astype(np.int64),
            targets=np.where(ends, NO_TARGET, following),
            positions=np.arange(len(begins)) - np.repeat(segments, lengths),
            lengths=tuple(lengths.tolist()),
        )

    def _shuffled(self, slots: Ints) -> Ints:
        """Return the rows at these slots of the shuffled order."""
        epochs = slots * self._context // len(self._tokens)  # the epoch in which each row begins
        rows = np.empty_like(slots)
        for index in np.unique(epochs).tolist():
            epoch, here = self._epoch(index), epochs == index
            rows[here] = epoch.first_row + epoch.rows[slots[here] - epoch.first_row]
        return rows

    def _look_up(self, indices: Ints) -> tuple[Ints, Ints, Ints]:
        """Return for stream indices the token's index in the shard, and whether it begins or ends a document."""
        epochs, inside = np.divmod(indices, len(self._tokens))
        sources, begins, ends = np.empty_like(indices), np.empty(len(indices), bool), np.empty(len(indices), bool)
        for index in np.unique(epochs).tolist():
            epoch, here = self._epoch(index), epochs == index
            slots = np.searchsorted(epoch.starts, inside[here], side="right") - 1
            depths = inside[here] - epoch.starts[slots]
            documents = epoch.documents[slots]
            sources[here] = self._offsets[documents] + depths
            begins[here], ends[here] = depths == 0, depths == self._lengths[documents] - 1
        return sources, begins, ends

    def _lay_out(self, index: int) -> _Epoch:
        documents = _permutation(len(self._lengths), self._seed, index, _DOCUMENTS)
        num_tokens = len(self._tokens)
        first, end = (-(-i * num_tokens // self._context) for i in (index, index + 1))
        return _Epoch(
            documents=documents,
            starts=np.concatenate([[0], np.cumsum(self._lengths[documents])]),
            first_row=first,
            rows=_permutation(end - first, self._seed, index, _ROWS),
        )


def whole_rows(batch: int, context: int, most: int) -> int:
    """Return the tokens of the largest part of a rank's batch that consists of whole rows and has at most `most`
    tokens.
    """
    rows = batch // context
    fits = [n for n in range(1, rows + 1) if rows % n == 0 and n * context <= max(most, context)]
    return max(fits, default=1) * context


def _permutation(size: int, *key: int) -> Ints:
    """Return the numbers below `size` sorted by hash. NumPy's generators are not used, as they may change with its
    version.
    """
    state = np.arange(size, dtype=np.uint64)
    for part in key:
        state = _mix(state ^ _mix(np.array([part], np.uint64)))
    return np.argsort(state, kind="stable")


def _mix(x: np.ndarray[Any, np.dtype[np.uint64]]) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """Apply SplitMix64 (Steele, Lea, Flood 2014): one step of its counter and its finalizer, modulo 2**64."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
