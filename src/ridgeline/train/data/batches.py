"""Batches of packed token rows: any step's batch from (seed, step) alone, so that training resumes exactly.

In each epoch the documents are laid end to end in an order of its own, and the epochs one after the other: one endless
stream of tokens. It is cut into rows of `context` tokens, and the rows that begin in an epoch are shuffled among
themselves, since rows of one long document would follow each other otherwise. A batch is the next few rows. So every
token of every epoch is used exactly once and all batches are equally large: an epoch has no tail, for its last row goes
on into the next one.

Attention never crosses from one document to another. What a row holds of a document is a segment, a sequence of its
own with positions from 0; where a row cuts a document, the rest begins in another row without what was before it.
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
_DOCUMENTS, _ROWS = 0, 1  # what is shuffled
_EPOCHS_KEPT = 3  # a batch can begin in one epoch, end in the next, and its last row in the one after


@dataclass(frozen=True, slots=True)
class Batch:
    """Segments laid end to end, as in runtime.step.DenseStep. All arrays are int64 [num_tokens].

    targets: the token that follows each token in its document, known even where it is in another row; NO_TARGET for
    the last token of a document. positions: of each token in its segment. lengths: tokens of each segment.
    """

    token_ids: Ints
    targets: Ints
    positions: Ints
    lengths: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Epoch:
    """documents [D]: their order; starts [D + 1]: where each begins, of the epoch's tokens; rows: the rows' order."""

    documents: Ints
    starts: Ints
    first_row: int
    rows: Ints


class Batches:
    """The batches of a shard, in an order that `seed` determines; those of one rank of `world_size`.

    Memory: 8 bytes for each row and 16 for each document, for up to three epochs. Safe to share between threads.
    """

    def __init__(
        self, shard: Shard, context: int, batch_tokens: int, seed: int = 0, *, rank: int = 0, world_size: int = 1
    ) -> None:
        """context: tokens of a row; batch_tokens: tokens of the batch of all ranks together.

        Raises RequestError where they are not positive, where the batch is no whole number of rows for each rank, and
        for a seed that is no uint64.
        """
        if context < 1 or batch_tokens < 1:
            raise RequestError(f"context is {context} and batch_tokens {batch_tokens}; both must be at least 1")
        if batch_tokens % (context * world_size):
            raise RequestError(
                f"a batch of {batch_tokens} tokens is not a whole number of rows of {context} tokens for each of "
                f"{world_size} ranks; ask for a multiple of {context * world_size}"
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
        """The batch of a step from 0: the same whenever it is asked for, whatever was asked for before."""
        return self._batch(self._rows(step))

    def micro_batches(self, step: int, micro_tokens: int) -> list[Batch]:
        """The same batch in parts of `micro_tokens` tokens. Raises RequestError for what does not divide it into rows.

        A part may have other numbers of targets than another: divide their summed losses by the sum of targets.
        """
        if micro_tokens < 1 or micro_tokens % self._context or self._num_rows * self._context % micro_tokens:
            raise RequestError(
                f"micro-batches of {micro_tokens} tokens do not divide {self._num_rows} rows of {self._context} tokens"
            )
        rows = self._rows(step)
        return [self._batch(part) for part in np.split(rows, len(rows) * self._context // micro_tokens)]

    def _rows(self, step: int) -> Ints:
        """The numbers of this rank's rows of a step."""
        if step < 0:
            raise ValueError(f"step is {step}; the first is 0")
        first = step * self._rows_per_batch + self._first_row
        return self._shuffled(np.arange(first, first + self._num_rows))

    def _batch(self, rows: Ints) -> Batch:
        places = rows[:, None] * self._context + np.arange(self._context)
        sources, begins, ends = self._look_up(places.ravel())
        begins[:: self._context] = True  # a row begins a segment, whatever it begins with
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
        """The rows that take these places in the order of all rows."""
        epochs = slots * self._context // len(self._tokens)  # in which the row of that number begins
        rows = np.empty_like(slots)
        for index in np.unique(epochs).tolist():
            epoch, here = self._epoch(index), epochs == index
            rows[here] = epoch.first_row + epoch.rows[slots[here] - epoch.first_row]
        return rows

    def _look_up(self, places: Ints) -> tuple[Ints, Ints, Ints]:
        """Of places in the stream: where the token is in the shard, and whether a document begins or ends with it."""
        epochs, inside = np.divmod(places, len(self._tokens))
        sources, begins, ends = np.empty_like(places), np.empty(len(places), bool), np.empty(len(places), bool)
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


def _permutation(size: int, *key: int) -> Ints:
    """The numbers below `size` by their hashes. Not NumPy's generators, whose numbers may change with its version."""
    state = np.arange(size, dtype=np.uint64)
    for part in key:
        state = _mix(state ^ _mix(np.array([part], np.uint64)))
    return np.argsort(state, kind="stable")


def _mix(x: np.ndarray[Any, np.dtype[np.uint64]]) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """SplitMix64 (Steele, Lea, Flood 2014): one step of its counter and its finalizer, modulo 2**64."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
