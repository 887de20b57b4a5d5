"""Pages in a simulator: those that nobody will look for again go back in runs, without a look at each.

What a sequence alone could find has no key until it is preempted, which is when it may come back for it. When it ends,
its full pages take the place among those with a key that they would have had, because it decides which of those are
lost. Equal to keys of their own, page by page (tests/pure/test_sim_jump.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from collections.abc import Sequence as Seq

from ridgeline.sched.cache import StateCache
from ridgeline.sched.pages import PagePool
from ridgeline.sched.sequence import Sequence
from ridgeline.spec.groups import StateGroup
from ridgeline.spec.state import ALL

ALONE = 1 << 62  # in Sequence.sealed: no page will get a key


class RunPool(PagePool):
    """A PagePool with runs: lists of pages that are free or in limbo together, where the first stands for all.

    They are taken from the end. A page in a run keeps its one reference, as if the run held it.
    """

    __slots__ = ("_runs",)

    def __init__(self, name: str, num_pages: int) -> None:
        super().__init__(name, num_pages)
        self._runs: dict[int, list[int]] = {}  # by their first page

    def retire(self, pages: list[int], until: int) -> None:
        """Drop pages without a key that one sequence holds, as if each had one. The last is handed out first."""
        if not pages:
            return
        self._runs[pages[0]] = pages
        self._wait(pages[:1], until)
        if pages[0] in self._limbo:
            self.num_limbo += len(pages) - 1

    def take_many(self, count: int) -> list[int]:
        """As of PagePool."""
        run = None if self._bare or not self._keyed else self._runs.get(self._keyed[0])
        if run is None or len(run) <= count or self._passed:
            return super().take_many(count)
        taken = run[: -count - 1 : -1]
        del run[-count:]
        self.num_free -= count
        self._note_peak()
        return taken

    def _release(self, pages: Seq[int]) -> int:
        runs, keys = self._runs, self._keys
        if not any(page in runs for page in pages):
            return super()._release(pages)
        self._keyed += [page for page in pages if page in runs or keys[page] is not None]
        self._bare += [page for page in pages if page not in runs and keys[page] is None]
        size = sum(len(runs.get(page, (page,))) for page in pages)
        self.num_free += size
        return size

    def _oldest(self, count: int) -> list[int]:
        found: list[int] = []
        while len(found) < count:
            page = super()._oldest(1)[0]
            run = self._runs.get(page)
            if run is None:
                found.append(page)
                continue
            left = max(len(run) - (count - len(found)), 0)
            found += reversed(run[left:])
            del run[left:]
            if run:
                self._keyed.appendleft(page)
            else:
                del self._runs[page]
        return found

    def _in_full(self, pages: Iterable[int]) -> list[int]:
        return [each for page in pages for each in self._runs.get(page, (page,))]

    def _in_runs(self) -> Set[int]:
        return set(self._in_full(self._runs))


class RunCache(StateCache):
    """A StateCache with runs, where there is one group whose pages all reach back to the beginning (`is_simple`)."""

    pools: Seq[RunPool]

    def __init__(self, groups: Seq[StateGroup], num_pages: Seq[int], num_host_pages: Seq[int]) -> None:
        super().__init__(groups, num_pages, num_host_pages)
        self.pools = [RunPool(g.name, n) for g, n in zip(groups, num_pages, strict=True)]
        self.is_simple = len(groups) == 1 and groups[0].lookback == ALL and not groups[0].snapshot

    def begin_alone(self, seq: Sequence) -> None:
        """It was given a place; does nobody else have a use for its pages?"""
        if self.is_simple and not seq.is_shared and not seq.num_preempted:
            seq.sealed[0] = ALONE

    def end_alone(self, seq: Sequence) -> None:
        """It leaves its place and will be back: give its full pages their keys."""
        if seq.tables and seq.sealed[0] == ALONE:
            seq.sealed[0] = 0
            self.advance(seq)

    def turn_page(self, seq: Sequence) -> None:
        """The last page is full now: publish it, and take the next one. Only where `is_simple`."""
        pool, table, size = self.pools[0], seq.tables[0], self.groups[0].page_tokens
        full = len(table)
        if seq.sealed[0] != ALONE:
            pool.seal(table[-1], seq.prefix_hash(full * size, self.grid))
            seq.sealed[0] = full
        table += pool.take_many(1)
        seq.sent[0] = full + 1
        seq.covered = seq.next_event = (full + 1) * size

    def release(self, seq: Sequence) -> None:
        """As of StateCache."""
        if seq.tables and seq.sealed[0] == ALONE:
            pool, table, full = self.pools[0], seq.tables[0], seq.computed // self.groups[0].page_tokens
            pool.drop_all(reversed(table[full:]), self.newest_step)
            del table[full:]
            pool.retire(table, self.newest_step)
            seq.tables = []
        super().release(seq)
