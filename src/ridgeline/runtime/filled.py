"""Know which rows of a draft model's state are right, in pages that the draft shares with its target."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from ridgeline.runtime.layout import Ints
from ridgeline.sched.work import PageCopy, Work
from ridgeline.spec.groups import NULL_PAGE, StateGroup


class _Ahead(NamedTuple):
    """A sequence for which the draft has computed rows [0, end). The last ones are those of its drafts."""

    sequence: int
    end: int


class Filled:
    """Counts the first rows of each page that the draft has computed.

    The counts move with the pages, so that sequences which share pages share the counts. The rows of drafts are counted
    too, although the target may reject them. `drop` takes them back before the next rows are computed there.

    groups: the draft's groups. tables: their page tables. num_pages, num_host_pages: pages of each group. indices: the
    number of each group in a plan.
    """

    def __init__(
        self, groups: Sequence[StateGroup], tables: Sequence[Ints], num_pages: Sequence[int],
        num_host_pages: Sequence[int], indices: Sequence[int],
    ) -> None:  # fmt: skip
        self._groups, self._tables, self._indices = groups, tables, indices
        self._device = [np.zeros(n, np.int64) for n in num_pages]
        self._host = [np.zeros(n, np.int64) for n in num_host_pages]
        self._ahead: dict[int, _Ahead] = {}  # by row of the page tables
        self._keep_null()

    def follow(self, works: Iterable[Work]) -> None:
        """Take note of the rows that a step of the target writes."""
        for work in works:
            ahead = self._ahead.get(work.row)
            if ahead is None:
                if work.deltas:
                    self.drop(work.row, work.start, self._end_of_new(work))
            elif ahead.sequence != work.sequence or len(work.tokens) != 1 + work.num_draft or not work.num_draft:
                del self._ahead[work.row]
                last = ahead.end if ahead.sequence == work.sequence else 0
                self.drop(work.row, work.start, max(last, self._end_of_new(work)))

    def _end_of_new(self, work: Work) -> int:
        """Return the end of the rows of a work, and of the pages that it gets, which held other rows before."""
        end = work.start + len(work.tokens)
        for delta in work.deltas:
            if delta.group in self._indices:
                group = self._groups[self._indices.index(delta.group)]
                end = max(end, (delta.first + len(delta.pages)) * group.page_tokens)
        return end

    def right(self, sequence: int, row: int, length: int) -> int:
        """Return how many of the first `length` tokens of a sequence need not be run again; drop the rows after them.

        length: number of tokens that the target has computed, so that all of them are known.
        """
        ahead = self._ahead.get(row)
        if ahead is None or ahead.sequence != sequence:
            return self.end(row, length)
        if ahead.end > length:
            self.drop(row, length, ahead.end)
        return min(ahead.end, length)

    def computed(self, sequence: int, row: int, start: int, end: int) -> None:
        """Record that the draft has computed rows [start, end) of a sequence, whose rows before are right."""
        self._ahead[row] = _Ahead(sequence, end)
        for group, table, filled in zip(self._groups, self._tables, self._device, strict=True):
            size = group.page_tokens
            for index in range(start // size, (end - 1) // size + 1):
                page, count = table[row, index], min(size, end - index * size)
                if filled[page] < count:
                    filled[page] = count

    def drop(self, row: int, start: int, end: int) -> None:
        """Record that rows [start, end) of a sequence are not right, nor those after them in the same pages."""
        for group, table, filled in zip(self._groups, self._tables, self._device, strict=True):
            size = group.page_tokens
            for index in range(start // size, min((end - 1) // size + 1, table.shape[1])):
                page, count = table[row, index], max(start - index * size, 0)
                if filled[page] > count and page != NULL_PAGE:
                    filled[page] = count

    def end(self, row: int, length: int) -> int:
        """Return how many of the first `length` tokens of a sequence have rows by the counts of its pages."""
        for group, table, filled in zip(self._groups, self._tables, self._device, strict=True):
            size = group.page_tokens
            pages = np.arange(group.first_live_page(length), group.num_pages(length))
            short = np.flatnonzero(filled[table[row, pages]] < size)
            if short.size:
                first = int(pages[short[0]])
                length = min(length, first * size + int(filled[table[row, first]]))
        return length

    def move(self, copies: Sequence[PageCopy], *, source: str, target: str) -> None:
        """Record copies of pages. source, target: "device" or "host"."""
        arrays = {"device": self._device, "host": self._host}
        for copy in copies:
            if copy.group in self._indices:
                group = self._indices.index(copy.group)
                arrays[target][group][copy.dst] = arrays[source][group][copy.src]
        self._keep_null()

    def _keep_null(self) -> None:
        for filled, group in zip(self._device, self._groups, strict=True):
            filled[NULL_PAGE] = group.page_tokens  # nobody reads it
