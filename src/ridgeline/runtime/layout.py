"""Where the tokens of one step read and write: from page tables on the host to a PagedLayout on the device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ridgeline.ops.api import Bucket, Memory, PagedLayout, Segments, SequenceBucket, SnapshotLayout
from ridgeline.spec.groups import NULL_PAGE

Ints = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, slots=True)
class Slices:
    """What a step runs: of each sequence the tokens [start, start + length), one sequence after the other.

    rows: each sequence's row in the page tables.
    """

    rows: Ints
    starts: Ints
    lengths: Ints

    @property
    def offsets(self) -> Ints:
        """The first of the step's T tokens that belongs to each sequence."""
        return np.cumsum(self.lengths) - self.lengths

    def positions(self) -> Ints:
        """[T], each token's place in its own sequence."""
        return np.repeat(self.starts, self.lengths) + _ranges(self.lengths)


def build_layout(
    slices: Slices, page_table: Ints, page_tokens: int, lookback: int, memory: Memory, first_tokens: int = 0
) -> PagedLayout:
    """The layout of one state group.

    page_table: [rows, pages], page ids by page index, 0 where there is none. lookback: how many tokens before its own
    a query reads. first_tokens: of each sequence, which every query reads besides.
    """
    reads = _pages_read(slices, page_tokens, lookback, first_tokens)
    positions = slices.positions()
    order = np.empty(positions.size, np.int64)
    buckets, base = [], 0
    for members in _like_shapes(slices, reads):
        lengths, longest = slices.lengths[members], int(slices.lengths[members].max())
        index, place = np.repeat(np.arange(members.size), lengths), _ranges(lengths)
        order[slices.offsets[members][index] + place] = base + index * longest + place
        base += members.size * longest
        arrays = _bucket(slices, members, longest, page_table, page_tokens, reads)
        buckets.append(Bucket(*(memory.integers(x) for x in arrays)))
    owner = np.repeat(slices.rows, slices.lengths)
    return PagedLayout(
        memory.integers(page_table[owner, positions // page_tokens]),
        memory.integers(positions % page_tokens),
        tuple(buckets),
        memory.integers(order),
    )


def build_snapshot_layout(slices: Slices, page_table: Ints, page_tokens: int, memory: Memory) -> SnapshotLayout:
    """The layout of a snapshot group: each sequence goes on from the state that its last token left.

    page_table: as in build_layout; page i holds the newest state that was left inside or at the end of its tokens.
    """
    fresh = slices.starts == 0
    before = np.maximum(slices.starts - 1, 0) // page_tokens
    last = (slices.starts + slices.lengths - 1) // page_tokens
    return SnapshotLayout(
        memory.integers(np.where(fresh, NULL_PAGE, page_table[slices.rows, before])),
        memory.integers(fresh),
        memory.integers(page_table[slices.rows, last]),
    )


def build_segments(lengths: Ints, memory: Memory) -> Segments:
    """Sequences of `lengths` tokens, laid end to end, padded together where they are alike in length."""
    offsets = np.cumsum(lengths) - lengths
    order, sequence_order = np.empty(int(lengths.sum()), np.int64), np.empty(lengths.size, np.int64)
    kind = np.ceil(np.log2(lengths)).astype(np.int64)
    buckets, tokens, sequences = [], 0, 0
    for value in np.unique(kind):
        members = np.flatnonzero(kind == value)
        own, longest = lengths[members], int(lengths[members].max())
        rows = offsets[members][:, None] + np.minimum(np.arange(longest), own[:, None] - 1)
        buckets.append(SequenceBucket(*(memory.integers(x) for x in (members, rows, own))))
        index, place = np.repeat(np.arange(members.size), own), _ranges(own)
        order[offsets[members][index] + place] = tokens + index * longest + place
        sequence_order[members] = sequences + np.arange(members.size)
        tokens, sequences = tokens + members.size * longest, sequences + members.size
    return Segments(tuple(buckets), memory.integers(order), memory.integers(sequence_order))


def _ranges(lengths: Ints) -> Ints:
    """0..length-1 for each length, one after the other."""
    return np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)


@dataclass(frozen=True, slots=True)
class _Reads:
    """The pages that each sequence's queries read: `head` from its beginning, then those from index `first` on; `count`
    in all.
    """

    head: Ints
    first: Ints
    count: Ints


def _pages_read(slices: Slices, page_tokens: int, lookback: int, first_tokens: int) -> _Reads:
    first = np.maximum(0, slices.starts - lookback) // page_tokens
    head = np.minimum(-(-first_tokens // page_tokens), first)
    return _Reads(head, first, head + (slices.starts + slices.lengths - 1) // page_tokens - first + 1)


def _like_shapes(slices: Slices, reads: _Reads) -> Iterator[Ints]:
    """Sequences grouped by the powers of two above their query and page counts: padding at most doubles either."""
    pages = reads.count
    kind = np.ceil(np.log2(slices.lengths)).astype(np.int64) * 64 + np.ceil(np.log2(pages)).astype(np.int64)
    for value in np.unique(kind):
        yield np.flatnonzero(kind == value)


def _bucket(
    slices: Slices, members: Ints, longest: int, page_table: Ints, page_tokens: int, reads: _Reads
) -> tuple[Ints, Ints, Ints, Ints]:
    """rows [n, m], positions [n, m], pages [n, P] and first [n, P] of a Bucket."""
    query = np.minimum(np.arange(longest), slices.lengths[members][:, None] - 1)
    head, first, count = (x[members][:, None] for x in (reads.head, reads.first, reads.count))
    page = np.arange(int(count.max()))
    index = np.minimum(np.where(page < head, page, first - head + page), page_table.shape[1] - 1)
    pages = np.where(page < count, page_table[slices.rows[members][:, None], index], 0)
    return (
        slices.offsets[members][:, None] + query,
        slices.starts[members][:, None] + query,
        pages,
        index * page_tokens,
    )
