"""A pool of page ids: reference counts, the free list in eviction order, and the prefix index.

A page is always in exactly one state:

    take()           held by sequences,             drop(), last one         waiting for a step that may touch it
    free ----------> num references >= 1 ----------------------------------> limbo (until step n)
      ^                      ^   share(): a prefix hit takes it back            |
      |                      +--------------------------------------------------+
      +-------------------------------------------------------------------------+  settle(n): step n was committed

A free page keeps its contents and its key until it is handed out again, so `find` may return it. Pages with a key are
handed out last, the least recently used first.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence, Set
from itertools import islice

from ridgeline.sched.page_times import PageLifetimes
from ridgeline.sched.sequence import PageKey
from ridgeline.spec.groups import NULL_PAGE


class PagePool:
    """Manages pages 1 to num_pages - 1 of one state group on the device, or of its swap space on the host.

    num_free: pages that can be taken now. num_limbo: pages that nobody holds and that a step in flight may still touch.
    peak: the highest num_used so far. residency: measures the lifetimes of pages; None: they are not measured.
    """

    __slots__ = (
        "_bare", "_by_key", "_keyed", "_keys", "_limbo", "_passed", "_refs", "_settled", "name", "num_free",
        "num_limbo", "num_pages", "peak", "residency",
    )  # fmt: skip

    def __init__(self, name: str, num_pages: int) -> None:
        self.name, self.num_pages = name, num_pages
        self.residency: PageLifetimes | None = None
        self._refs = [0] * num_pages
        self._keys: list[PageKey | None] = [None] * num_pages
        self._by_key: dict[PageKey, int] = {}
        self._bare = list(range(num_pages - 1, NULL_PAGE, -1))  # free, without a key; the last is handed out first
        # Free, with a key; the first is handed out first. A page that was shared meanwhile keeps its entries, which are
        # then skipped: `_passed` counts them.
        self._keyed: deque[int] = deque()
        self._passed: Counter[int] = Counter()
        self._limbo: dict[int, int] = {}  # page -> the step that must be committed first, ascending
        self._settled = 0
        self.num_free, self.num_limbo, self.peak = len(self._bare), 0, 0

    @property
    def num_used(self) -> int:
        """Number of pages that sequences hold; a shared page counts once."""
        return max(self.num_pages - 1, 0) - self.num_free - self.num_limbo

    @property
    def num_keys(self) -> int:
        """Number of pages in the prefix index, held or free."""
        return len(self._by_key)

    def is_free(self, page: int) -> bool:
        """Return whether the page is on the free list."""
        return page != NULL_PAGE and not self._refs[page] and page not in self._limbo

    def take(self) -> int:
        """Take a free page: it has one reference and no key. Raises KeyError if none is free."""
        return self.take_many(1)[0]

    def take_many(self, count: int) -> list[int]:
        """Take several free pages, in the order in which `take` would return them."""
        if count > self.num_free:
            raise KeyError(f"{self.name}: {count} pages, and {self.num_free} are free")
        refs, keys, by_key, bare = self._refs, self._keys, self._by_key, self._bare
        start = max(len(bare) - count, 0)
        taken = bare[start:]
        taken.reverse()
        del bare[start:]
        if len(taken) < count:
            evicted = self._oldest(count - len(taken))
            if self.residency is not None:
                self.residency.evict(evicted)
            for page in evicted:
                key = keys[page]
                if key is not None:
                    del by_key[key]
                    keys[page] = None
            taken += evicted
        if self.residency is not None:
            self.residency.take(taken)
        for page in taken:
            refs[page] = 1
        self.num_free -= count
        self._note_peak()
        return taken

    def share(self, page: int) -> None:
        """Add a holder to a page that is held, or that `find` returned."""
        if not self._refs[page]:
            if page in self._limbo:
                del self._limbo[page]
                self.num_limbo -= 1
            else:  # found by its key
                self.num_free -= 1
                self._passed[page] += 1
                if len(self._keyed) > 2 * self.num_pages:
                    self._tidy()
            self._note_peak()
        if self.residency is not None:
            self.residency.use(page)
        self._refs[page] += 1

    def drop(self, page: int, until: int) -> None:
        """Remove a holder. A page without holders is handed out again once step `until` was committed."""
        self.drop_all((page,), until)

    def drop_all(self, pages: Iterable[int], until: int) -> None:
        """Remove a holder from each page, in order."""
        refs, gone = self._refs, []
        for page in pages:
            if page == NULL_PAGE:
                continue
            left = refs[page] = refs[page] - 1
            if left <= 0:
                assert not left, f"{self.name}: page {page} dropped twice"
                gone.append(page)
        if self.residency is not None:
            self.residency.leave(gone)
        self._wait(gone, until)

    def settle(self, step: int) -> None:
        """Record that a step, and every step before it, was committed."""
        self._settled = step
        limbo = self._limbo
        if not limbo:
            return
        if next(reversed(limbo.values())) <= step:
            due = list(limbo)
            limbo.clear()
        else:
            due = [page for page, until in limbo.items() if until <= step]
            for page in due:
                del limbo[page]
        self.num_limbo -= self._release(due)

    def writable(self, page: int) -> bool:
        """Return whether the page may be written: it has one holder and is not in the prefix index."""
        return self._refs[page] == 1 and self._keys[page] is None

    def seal(self, page: int, key: PageKey) -> None:
        """Add a full page to the prefix index. If the key is there already, the earlier page keeps it."""
        self.seal_all((page,), (key,))

    def seal_all(self, pages: Iterable[int], keys: Iterable[PageKey]) -> None:
        """Add full pages to the prefix index, in order."""
        of_page, by_key = self._keys, self._by_key
        for page, key in zip(pages, keys, strict=True):
            if page != NULL_PAGE and of_page[page] is None and key not in by_key:
                of_page[page] = key
                by_key[key] = page

    def find(self, key: PageKey) -> int:
        """Return the page that was sealed with `key`; NULL_PAGE if there is none."""
        return self._by_key.get(key, NULL_PAGE)

    def check(self, held: dict[int, int]) -> None:
        """Raise AssertionError unless references equal `held` (page -> count) and every page is in one state."""
        runs = self._in_runs()
        counted = {page: refs for page, refs in enumerate(self._refs) if refs and page not in runs}
        assert counted == held, f"{self.name}: references are {counted}, holders {held}"
        free, limbo = self._in_full([*self._bare, *self._live_keyed()]), self._in_full(self._limbo)
        pages = [*held, *free, *limbo]
        once = len(pages) == len(set(pages)) == max(self.num_pages - 1, 0) and NULL_PAGE not in pages
        assert once, f"{self.name}: a page is lost, or in two states"
        counts = (self.num_free, self.num_limbo)
        assert counts == (len(free), len(limbo)), (
            f"{self.name}: free and in limbo {len(free), len(limbo)}, not {counts}"
        )
        apart = not any(map(self._has_key, self._bare)) and all(map(self._has_key, {*self._live_keyed()} - runs))
        assert apart, f"{self.name}: a free page is on the wrong side of the index"
        assert all(self._keys[page] == key for key, page in self._by_key.items()), f"{self.name}: stale index"
        assert sum(key is not None for key in self._keys) == len(self._by_key), f"{self.name}: unindexed key"
        limits = list(self._limbo.values())
        assert limits == sorted(limits), f"{self.name}: limbo out of order"

    def _wait(self, pages: Sequence[int], until: int) -> None:
        """Release pages that nobody holds, once step `until` was committed."""
        if until > self._settled:
            self._limbo.update(dict.fromkeys(pages, until))
            self.num_limbo += len(pages)
        else:
            self._release(pages)

    def _release(self, pages: Sequence[int]) -> int:
        """Put pages on the free list; the number of pages."""
        keys = self._keys
        keyed = [page for page in pages if keys[page] is not None]
        self._keyed += keyed
        if len(keyed) < len(pages):  # they hold nothing that a request can find, so they are reused first
            self._bare += [page for page in pages if keys[page] is None]
        self.num_free += len(pages)
        return len(pages)

    def _oldest(self, count: int) -> list[int]:
        """Remove the `count` least recently used pages with a key from the free list."""
        pop = self._keyed.popleft
        return [pop() for _ in range(count)] if not self._passed else list(islice(self._pop_live(), count))

    def _pop_live(self) -> Iterator[int]:
        passed, pop = self._passed, self._keyed.popleft
        while True:
            page = pop()
            if page not in passed:
                yield page
            elif passed[page] == 1:
                del passed[page]
            else:
                passed[page] -= 1

    def _live_keyed(self) -> list[int]:
        """Return the free pages with a key, in order; of several entries for a page the last one counts."""
        passed = self._passed.copy()
        found = []
        for page in self._keyed:
            if passed[page]:
                passed[page] -= 1
            else:
                found.append(page)
        return found

    def _has_key(self, page: int) -> bool:
        return self._keys[page] is not None

    def _in_full(self, pages: Iterable[int]) -> list[int]:
        """Return the pages that entries represent; in this class each entry is one page."""
        return list(pages)

    def _in_runs(self) -> Set[int]:
        """Return the pages that are members of a run; in this class there are none."""
        return frozenset()

    def _tidy(self) -> None:
        self._keyed = deque(self._live_keyed())
        self._passed.clear()

    def _note_peak(self) -> None:
        used = self.num_pages - 1 - self.num_free - self.num_limbo
        if used > self.peak:
            self.peak = used
