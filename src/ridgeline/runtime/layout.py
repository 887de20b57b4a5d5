"""Where the tokens of one step read and write: from page tables on the host to a PagedLayout on the device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ridgeline.ops.api import Bucket, Buckets, Memory, PagedLayout, Segments, SequenceBucket, SnapshotLayout
from ridgeline.spec.groups import NULL_PAGE

Ints = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, slots=True)
class Slices:
    """What a step runs: of each sequence the tokens [start, start + length), one sequence after the other.

    rows: each sequence's row in the page tables. drafts: how many of its tokens, the last ones, are drafts. replays:
    how many tokens before `start` are accepted drafts, which the state in pages does not hold yet. floors: of the
    context for which each sequence turns at least (spec/regimes.py).
    """

    rows: Ints
    starts: Ints
    lengths: Ints
    drafts: Ints
    replays: Ints
    floors: Ints

    @classmethod
    def plain(cls, rows: Ints, starts: Ints, lengths: Ints) -> Slices:
        """Without drafts and floors."""
        none = np.zeros_like(rows)
        return cls(rows, starts, lengths, none, none, none)

    @property
    def known(self) -> Ints:
        """Tokens of each sequence that are no drafts."""
        return self.lengths - self.drafts

    @property
    def offsets(self) -> Ints:
        """The first of the step's T tokens that belongs to each sequence."""
        return np.cumsum(self.lengths) - self.lengths

    def positions(self) -> Ints:
        """[T], each token's place in its own sequence."""
        return np.repeat(self.starts, self.lengths) + ranges(self.lengths)


def build_layout(
    slices: Slices, page_table: Ints, page_tokens: int, lookback: int, memory: Memory, first_tokens: int = 0
) -> PagedLayout:
    """The layout of one state group.

    page_table: [rows, pages], page ids by page index, 0 where there is none. lookback: how many tokens before its own
    a query reads. first_tokens: of each sequence, which every query reads besides.
    """
    positions, owner = slices.positions(), np.repeat(slices.rows, slices.lengths)
    # A copy: the buckets may be made when the page table has moved on.
    tables = page_table[slices.rows, : -(-int((slices.starts + slices.lengths).max()) // page_tokens)]
    reads = _pages_read(slices, page_tokens, lookback, first_tokens)
    return PagedLayout(
        memory.integers(page_table[owner, positions // page_tokens]),
        memory.integers(positions % page_tokens),
        memory.integers(slices.starts),
        memory.integers(slices.lengths),
        memory.integers(tables),
        lambda: _buckets(slices, tables, page_tokens, reads, memory),
    )


def _buckets(slices: Slices, tables: Ints, page_tokens: int, reads: _Reads, memory: Memory) -> Buckets:
    positions = slices.positions()
    order = np.empty(positions.size, np.int64)
    buckets, base = [], 0
    for members in _like_shapes(slices, reads):
        lengths, longest = slices.lengths[members], int(slices.lengths[members].max())
        index, place = np.repeat(np.arange(members.size), lengths), ranges(lengths)
        order[slices.offsets[members][index] + place] = base + index * longest + place
        base += members.size * longest
        arrays = _bucket(slices, members, longest, tables, page_tokens, reads)
        buckets.append(Bucket(*(memory.integers(x) for x in arrays)))
    return Buckets(tuple(buckets), memory.integers(order))


def build_snapshot_layout(slices: Slices, page_table: Ints, page_tokens: int, memory: Memory) -> SnapshotLayout:
    """The layout of a snapshot group: each sequence goes on from the state of its last commit, and leaves the one
    before its drafts.

    page_table: as in build_layout; page i holds the newest state that was left inside or at the end of its tokens.
    """
    begins = slices.starts - slices.replays
    fresh = begins == 0
    before = np.maximum(begins - 1, 0) // page_tokens
    last = (slices.starts + slices.known - 1) // page_tokens
    return SnapshotLayout(
        memory.integers(np.where(fresh, NULL_PAGE, page_table[slices.rows, before])),
        memory.integers(fresh),
        memory.integers(page_table[slices.rows, last]),
    )


def build_segments(slices: Slices, memory: Memory) -> Segments:
    """The tokens that run along each sequence, padded together where sequences are alike in length.

    Tokens to replay, of all sequences, stand before the step's own.
    """
    replays, known, drafts = slices.replays, slices.known, slices.drafts
    num_replays, own = int(replays.sum()), replays + known
    place = ranges(own) - np.repeat(replays, own)  # below 0: a token to replay
    first = np.repeat(num_replays + slices.offsets, own)
    rows = np.where(place < 0, np.repeat(np.cumsum(replays), own), first) + place
    run = _run(rows, own, np.arange(own.size), memory)
    some = np.flatnonzero(drafts)
    keep = np.repeat(slices.offsets + known, drafts) + ranges(drafts)
    tail = _run(num_replays + keep, drafts[some], some, memory)
    order = np.empty(int(slices.lengths.sum()), np.int64)
    order[rows[place >= 0] - num_replays] = run.places[place >= 0]
    order[keep] = run.size + tail.places
    return Segments(
        run.buckets, memory.integers(order), memory.integers(run.sequence_places), tail.buckets,
        memory.integers(keep) if keep.size else None,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Run:
    """Sequences in buckets. places, sequence_places: where the result of each token and the state of each sequence
    stand when those of the buckets are laid end to end; size: of the tokens' results.
    """

    buckets: tuple[SequenceBucket, ...]
    places: Ints
    sequence_places: Ints
    size: int


def _run(rows: Ints, lengths: Ints, sequences: Ints, memory: Memory) -> _Run:
    """rows: of all tokens, one sequence after the other; sequences: whose they are, one number for each length."""
    offsets = np.cumsum(lengths) - lengths
    places, sequence_places = np.empty(rows.size, np.int64), np.empty(lengths.size, np.int64)
    kind = np.ceil(np.log2(lengths)).astype(np.int64)
    buckets, tokens, num = [], 0, 0
    for value in np.unique(kind):
        members = np.flatnonzero(kind == value)
        own, longest = lengths[members], int(lengths[members].max())
        at = offsets[members][:, None] + np.minimum(np.arange(longest), own[:, None] - 1)
        buckets.append(SequenceBucket(*(memory.integers(x) for x in (sequences[members], rows[at], own))))
        index, place = np.repeat(np.arange(members.size), own), ranges(own)
        places[offsets[members][index] + place] = tokens + index * longest + place
        sequence_places[members] = num + np.arange(members.size)
        tokens, num = tokens + members.size * longest, num + members.size
    return _Run(tuple(buckets), places, sequence_places, tokens)


def ranges(lengths: Ints) -> Ints:
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
    slices: Slices, members: Ints, longest: int, tables: Ints, page_tokens: int, reads: _Reads
) -> tuple[Ints, Ints, Ints, Ints]:
    """rows [n, m], positions [n, m], pages [n, P] and first [n, P] of a Bucket."""
    query = np.minimum(np.arange(longest), slices.lengths[members][:, None] - 1)
    head, first, count = (x[members][:, None] for x in (reads.head, reads.first, reads.count))
    page = np.arange(int(count.max()))
    index = np.minimum(np.where(page < head, page, first - head + page), tables.shape[1] - 1)
    pages = np.where(page < count, tables[members[:, None], index], 0)
    return (
        slices.offsets[members][:, None] + query,
        slices.starts[members][:, None] + query,
        pages,
        index * page_tokens,
    )
