"""Page pools of the simulator: pages that no other sequence can reuse are released in runs, not one by one.

A page that only its own sequence can reuse gets no key until that sequence is preempted. When the sequence ends, its
full pages enter the free list where pages with keys would, because their order decides which pages are evicted. The
results equal those of a key for each page (tests/pure/test_sim_jump.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from collections.abc import Sequence as Seq

from ridgeline.sched.cache import StateCache
from ridgeline.sched.pages import PagePool
from ridgeline.sched.sequence import Sequence
from ridgeline.spec.groups import StateGroup
from ridgeline.spec.state import ALL

ALONE = 1 << 62  # value of Sequence.sealed: no page gets a key


class RunPool(PagePool):
    """A PagePool with runs: lists of pages that are free or in limbo together; the first page represents all.

    Pages are taken from the end of a run. A page in a run keeps one reference, as if the run held it.
    """

    __slots__ = ("_runs",)

    def __init__(self, name: str, num_pages: int, keep: int = 0) -> None:
        super().__init__(name, num_pages, keep)
        self._runs: dict[int, list[int]] = {}  # by their first page

    def retire(self, pages: list[int], until: int) -> None:
        """Release pages of one sequence as a run, as if each had a key. The last page is handed out first."""
        if not pages:
            return
        self._runs[pages[0]] = pages
        self._wait(pages[:1], until)
        if pages[0] in self._limbo:
            self.num_limbo += len(pages) - 1

    def take_many(self, count: int) -> list[int]:
        """Take several free pages; see PagePool."""
        run = None if self._bare or not self._keyed else self._runs.get(self._keyed[0])
        if run is None or len(run) <= count or self._passed or self._num_evicted(count) < count:
            return super().take_many(count)
        taken = run[: -count - 1 : -1]
        del run[-count:]
        self._evicted += count
        self._forget()
        self.num_free -= count
        self._note_peak()
        return taken

    def _release(self, pages: Seq[int]) -> int:
        runs, keys = self._runs, self._keys
        if not any(page in runs for page in pages):
            return super()._release(pages)
        self._keyed += [page for page in pages if page in runs or keys[page] is not None]
        bare = [page for page in pages if page not in runs and keys[page] is None]
        self._bare += bare
        size = sum(len(runs.get(page, (page,))) for page in pages)
        self.num_free += size
        self._note_released((page for page in pages if keys[page] is not None), size - len(bare))
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
    """A StateCache with runs, if there is one group and its layers attend to all tokens (`is_simple`)."""

    pools: Seq[RunPool]

    def __init__(self, groups: Seq[StateGroup], num_pages: Seq[int], num_host_pages: Seq[int]) -> None:
        super().__init__(groups, num_pages, num_host_pages)
        self.pools = [RunPool(g.name, n, g.kept_pages) for g, n in zip(groups, num_pages, strict=True)]
        self.is_simple = len(groups) == 1 and groups[0].lookback == ALL and not groups[0].snapshot

    def begin_alone(self, seq: Sequence) -> None:
        """Give no keys to the pages of a sequence that was admitted, if no other sequence can reuse them."""
        if self.is_simple and not seq.is_shared and not seq.num_preempted:
            seq.sealed[0] = ALONE

    def end_alone(self, seq: Sequence) -> None:
        """Give the full pages of a sequence their keys, because it is preempted and will look for them."""
        if seq.tables and seq.sealed[0] == ALONE:
            seq.sealed[0] = 0
            self.advance(seq)

    def turn_page(self, seq: Sequence) -> None:
        """Publish the last page of a sequence, which is full, and take the next one. Needs `is_simple`."""
        pool, table, size = self.pools[0], seq.tables[0], self.groups[0].page_tokens
        full = len(table)
        if seq.sealed[0] != ALONE:
            pool.seal(table[-1], seq.prefix_hash(full * size, self.grid))
            seq.sealed[0] = full
        table += pool.take_many(1)
        seq.sent[0] = full + 1
        seq.covered = seq.next_event = (full + 1) * size

    def release(self, seq: Sequence) -> None:
        """Release all pages of a sequence; see StateCache."""
        if seq.tables and seq.sealed[0] == ALONE:
            pool, table, full = self.pools[0], seq.tables[0], seq.computed // self.groups[0].page_tokens
            pool.drop_all(reversed(table[full:]), self.newest_step)
            del table[full:]
            pool.retire(table, self.newest_step)
            seq.tables = []
        super().release(seq)
