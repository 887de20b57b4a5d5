"""Build the layout of a step: from page tables on the host to the pages that its tokens read and write."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ridgeline.ops.api import Bucket, Buckets, BucketTree, Memory, PagedLayout, Segments, SequenceBucket, SnapshotLayout
from ridgeline.sched.work import Work
from ridgeline.spec.groups import NULL_PAGE
from ridgeline.spec.trees import MOST_DRAFTS

Ints = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, slots=True)
class Slices:
    """The tokens of a step: [start, start + length) of each sequence, one sequence after the other.

    rows: each sequence's row in the page tables. drafts: number of drafts among its tokens, which come last. replays:
    number of accepted drafts before `start`, which the state in pages does not include yet. paths: the
    path of each token (ops.api.PagedLayout) if drafts form trees, whose slots are not positions; None: they are chains.
    reads: number of rows that each sequence's tokens read, if some read rows after the step's own (Work.reads).
    """

    rows: Ints
    starts: Ints
    lengths: Ints
    drafts: Ints
    replays: Ints
    floors: Ints
    paths: Ints | None = None
    reads: Ints | None = None

    @classmethod
    def plain(cls, rows: Ints, starts: Ints, lengths: Ints) -> Slices:
        """Return slices without drafts."""
        none = np.zeros_like(rows)
        return cls(rows, starts, lengths, none, none, none)

    @property
    def known(self) -> Ints:
        """Return the number of tokens of each sequence that are no drafts."""
        return self.lengths - self.drafts

    @property
    def offsets(self) -> Ints:
        """Return the index of each sequence's first token among the step's T tokens."""
        return np.cumsum(self.lengths) - self.lengths

    def reading(self) -> Slices:
        """Return the slices as attention sees them: its tokens are the last ones of the rows that they read.

        Where rows after a token are read, all tokens read the same rows, so that their own slots do not matter.
        """
        return self if self.reads is None else replace(self, starts=self.reads - self.lengths, reads=None)

    def slots(self) -> Ints:
        """Return the slot of each token's rows among those of its sequence, [T]."""
        return np.repeat(self.starts, self.lengths) + ranges(self.lengths)

    def positions(self) -> Ints:
        """Return the position of each token in its sequence, [T]."""
        slots = self.slots()
        if self.paths is None:
            return slots
        before = np.repeat(self.starts + self.known - 1, self.lengths)
        ancestors = np.unpackbits(self.paths.view(np.uint8).reshape(-1, 8), axis=1).sum(1, dtype=np.int64)
        return np.where(self.paths != 0, before + ancestors, slots)


def build_layout(
    slices: Slices, page_table: Ints, page_tokens: int, lookback: int, memory: Memory, first_tokens: int = 0
) -> PagedLayout:
    """Build the layout of one state group.

    page_table: page ids by page index [rows, pages], 0 for no page. lookback: number of tokens before its own that a
    query reads. first_tokens: number of tokens at the start of each sequence that every query reads as well.
    """
    slots, owner = slices.slots(), np.repeat(slices.rows, slices.lengths)
    reading = slices.reading()
    # A copy: the buckets may be built after the page table has changed.
    tables = page_table[slices.rows, : -(-int((reading.starts + slices.lengths).max()) // page_tokens)]
    reads = _pages_read(reading, page_tokens, lookback, first_tokens)
    return PagedLayout(
        memory.integers(page_table[owner, slots // page_tokens]),
        memory.integers(slots % page_tokens),
        memory.integers(reading.starts),
        memory.integers(slices.lengths),
        memory.integers(tables),
        lambda: _buckets(reading, tables, page_tokens, reads, memory),
        None if slices.paths is None else memory.integers(slices.paths),
    )


def _buckets(slices: Slices, tables: Ints, page_tokens: int, reads: _Reads, memory: Memory) -> Buckets:
    positions = slices.positions()
    order = np.empty(positions.size, np.int64)
    buckets, base = [], 0
    for members in _like_shapes(slices, reads):
        lengths, longest = slices.lengths[members], int(slices.lengths[members].max())
        index, offset = np.repeat(np.arange(members.size), lengths), ranges(lengths)
        order[slices.offsets[members][index] + offset] = base + index * longest + offset
        base += members.size * longest
        rows, pages, first = _bucket(slices, members, longest, tables, page_tokens, reads)
        tree = None
        if slices.paths is not None:
            tree = BucketTree(*(memory.integers(x) for x in _bucket_tree(slices, members, rows, positions)))
        given = [memory.integers(x) for x in (rows, positions[rows], pages, first)]
        buckets.append(Bucket(given[0], given[1], given[2], given[3], tree))
    return Buckets(tuple(buckets), memory.integers(order))


def build_snapshot_layout(slices: Slices, page_table: Ints, page_tokens: int, memory: Memory) -> SnapshotLayout:
    """Build the layout of a snapshot group: a sequence reads its state at the last commit, and writes the one before
    its drafts.

    page_table: as in build_layout; page i holds the newest state at a position inside or at the end of its tokens.
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
    """Build the runs of tokens along each sequence; sequences of similar lengths are padded together.

    The tokens that are replayed, of all sequences, come before the step's own.
    """
    replays, known, drafts = slices.replays, slices.known, slices.drafts
    num_replays, own = int(replays.sum()), replays + known
    offset = ranges(own) - np.repeat(replays, own)  # below 0: a token that is replayed
    first = np.repeat(num_replays + slices.offsets, own)
    rows = np.where(offset < 0, np.repeat(np.cumsum(replays), own), first) + offset
    run = _run(rows, own, np.arange(own.size), memory)
    some = np.flatnonzero(drafts)
    keep = np.repeat(slices.offsets + known, drafts) + ranges(drafts)
    tail = _run(num_replays + keep, drafts[some], some, memory)
    order = np.empty(int(slices.lengths.sum()), np.int64)
    order[rows[offset >= 0] - num_replays] = run.indices[offset >= 0]
    order[keep] = run.size + tail.indices
    return Segments(
        run.buckets, memory.integers(order), memory.integers(run.sequence_indices), tail.buckets,
        memory.integers(keep) if keep.size else None,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Run:
    """Sequences in buckets, whose results are concatenated.

    indices: index of each token's result. sequence_indices: index of each sequence's state. size: number of results.
    """

    buckets: tuple[SequenceBucket, ...]
    indices: Ints
    sequence_indices: Ints
    size: int


def _run(rows: Ints, lengths: Ints, sequences: Ints, memory: Memory) -> _Run:
    """Put sequences into buckets. rows: rows of all tokens, sequence by sequence. sequences: one id per length."""
    offsets = np.cumsum(lengths) - lengths
    indices, sequence_indices = np.empty(rows.size, np.int64), np.empty(lengths.size, np.int64)
    kind = np.ceil(np.log2(lengths)).astype(np.int64)
    buckets, tokens, num = [], 0, 0
    for value in np.unique(kind):
        members = np.flatnonzero(kind == value)
        own, longest = lengths[members], int(lengths[members].max())
        at = offsets[members][:, None] + np.minimum(np.arange(longest), own[:, None] - 1)
        buckets.append(SequenceBucket(*(memory.integers(x) for x in (sequences[members], rows[at], own))))
        index, offset = np.repeat(np.arange(members.size), own), ranges(own)
        indices[offsets[members][index] + offset] = tokens + index * longest + offset
        sequence_indices[members] = num + np.arange(members.size)
        tokens, num = tokens + members.size * longest, num + members.size
    return _Run(tuple(buckets), indices, sequence_indices, tokens)


def ranges(lengths: Ints) -> Ints:
    """Return 0, ..., length - 1 for each length, concatenated."""
    return np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)


@dataclass(frozen=True, slots=True)
class _Reads:
    """The pages that each sequence's queries read: `head` pages from its beginning, then pages from index `first` on;
    `count` pages in all.
    """

    head: Ints
    first: Ints
    count: Ints


def _pages_read(slices: Slices, page_tokens: int, lookback: int, first_tokens: int) -> _Reads:
    first = np.maximum(0, slices.starts - lookback) // page_tokens
    head = np.minimum(-(-first_tokens // page_tokens), first)
    return _Reads(head, first, head + (slices.starts + slices.lengths - 1) // page_tokens - first + 1)


def _like_shapes(slices: Slices, reads: _Reads) -> Iterator[Ints]:
    """Group sequences by the powers of two above their query and page counts: padding at most doubles either."""
    pages = reads.count
    kind = np.ceil(np.log2(slices.lengths)).astype(np.int64) * 64 + np.ceil(np.log2(pages)).astype(np.int64)
    for value in np.unique(kind):
        yield np.flatnonzero(kind == value)


def _bucket(
    slices: Slices, members: Ints, longest: int, tables: Ints, page_tokens: int, reads: _Reads
) -> tuple[Ints, Ints, Ints]:
    """Return rows [n, m], pages [n, P] and first [n, P] of a Bucket."""
    query = np.minimum(np.arange(longest), slices.lengths[members][:, None] - 1)
    head, first, count = (x[members][:, None] for x in (reads.head, reads.first, reads.count))
    page = np.arange(int(count.max()))
    index = np.minimum(np.where(page < head, page, first - head + page), tables.shape[1] - 1)
    pages = np.where(page < count, tables[members[:, None], index], 0)
    return slices.offsets[members][:, None] + query, pages, index * page_tokens


def _bucket_tree(slices: Slices, members: Ints, rows: Ints, positions: Ints) -> tuple[Ints, Ints, Ints, Ints]:
    """Return limits [n, 1], ends [n, 1], positions [n, 64] and paths [n, m] of a BucketTree.

    rows: indices of the bucket's queries. positions: positions of the step's tokens.
    """
    assert slices.paths is not None
    counts = np.add.reduceat(slices.paths != 0, slices.offsets)[members][:, None]  # chains count as known tokens
    first = (slices.offsets + slices.lengths)[members][:, None] - counts
    drafts = np.minimum(first + np.arange(MOST_DRAFTS + 1), positions.size - 1)
    ends = (slices.starts + slices.lengths)[members][:, None]
    return ends - counts, ends, positions[drafts], slices.paths[rows]


def adapters_of(works: Sequence[Work]) -> list[int]:
    """Return the slot of each sequence's adapter, -1 for none; an empty list if no sequence has one."""
    slots = [work.adapter for work in works]
    return slots if max(slots, default=-1) >= 0 else []
