"""Inputs of recorded steps of recurrent layers with drafts, or with accepted drafts that run again.

Other steps may have other numbers of both, and a recording has fixed shapes. So each sequence has room for D drafts and
for D accepted ones, and how many it has is an input. The D kept inputs of each sequence come before the step's T tokens
(ops.api.Segments).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from ridgeline.ops.api import Array, Segments, SequenceBucket
from ridgeline.runtime.layout import Ints, ranges
from ridgeline.runtime.padding import Tokens

A = TypeVar("A")
Matrix = Callable[[Array, int], Array]


class Again(NamedTuple, Generic[A]):
    """Arrays of a step of n sequences and T tokens, or their numbers, or their sizes.

    rows, known: row of the page tables and position of each sequence's known token [n]. read: where its D kept inputs
    are [n * D]. first, counts: the accepted drafts and the known token [n * (D + 1)], and their number [n]. drafts,
    draft_counts: its drafts [n * D], and their number [n]. order: as in Segments, [T]. keep, write: the drafts among
    the tokens, and where their inputs are kept [T - n].
    """

    rows: A
    known: A
    read: A
    first: A
    counts: A
    drafts: A
    draft_counts: A
    order: A
    keep: A
    write: A


def sizes(n: int, total: int, most: int) -> Again[int]:
    """Return the number of numbers in each array. most: D."""
    return Again(n, n, n * most, n * (most + 1), n, n * most, n, total, total - n, total - n)


def numbers(given: Tokens, replays: Sequence[int], most: int) -> Again[Ints]:
    """Return the numbers of a step. replays: accepted drafts of each sequence that run again. most: D."""
    rows, starts, lengths, again = (np.array(x) for x in (*given[:3], replays))
    drafts, each, offsets = lengths - 1, np.arange(len(rows)), np.cumsum(lengths) - lengths
    base = (len(rows) * most + offsets)[:, None]  # known tokens
    at, inside = np.arange(most + 1), ranges(drafts)
    first = np.where(at < again[:, None], each[:, None] * most + at, base)
    keep = np.repeat(offsets, drafts) + 1 + inside
    order = np.empty(int(lengths.sum()), np.int64)
    order[offsets] = each * (most + 1) + again
    order[keep] = len(rows) * (most + 1) + np.repeat(each * most, drafts) + inside
    return Again(
        rows, starts, (rows[:, None] * most + at[:most]).ravel(), first.ravel(), again + 1,
        # A sequence without drafts runs its known token in their place, and nobody reads the result.
        (base + np.minimum(at[1:], drafts[:, None])).ravel(), np.maximum(drafts, 1), order, keep,
        np.repeat(rows * most, drafts) + inside,
    )  # fmt: skip


def segments(arrays: Again[Array], members: Array, most: int, matrix: Matrix, *, has_drafts: bool) -> Segments:
    """Return the segments of a step. members: 0 to n - 1. most: D. matrix: as in ops.driver.Recorder."""
    run = SequenceBucket(members, matrix(arrays.first, most + 1), arrays.counts)
    if not has_drafts:
        return Segments((run,), arrays.order, members)
    tail = SequenceBucket(members, matrix(arrays.drafts, most), arrays.draft_counts)
    return Segments((run,), arrays.order, members, (tail,), arrays.keep)
