"""One pool of page ids: reference counts, the free list in eviction order, and the prefix index.

A page is always in exactly one place:

    take()           held by sequences,             drop(), last one         waiting for a step that may touch it
    free ----------> num references >= 1 ----------------------------------> limbo (until step n)
      ^                      ^   share(): a prefix hit takes it back            |
      |                      +--------------------------------------------------+
      +-------------------------------------------------------------------------+  settle(n): step n was committed

A free page keeps its contents and its key until it is handed out again, so `find` may revive it. Pages with a key are
handed out last, the least recently used of them first.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence, Set
from itertools import islice

from ridgeline.sched.page_times import PageLifetimes
from ridgeline.sched.sequence import PageKey
from ridgeline.spec.groups import NULL_PAGE


class PagePool:
    """Pages 1 to num_pages - 1 of one state group on the device, or of its swap space on the host.

    num_free: pages that can be taken now. num_limbo: that nobody holds and that a step in flight may still touch. peak:
    of num_used, since the start. residency: where its pages' times are counted; None: nowhere.
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
        # Free, with a key; the first is handed out first. A page that was shared meanwhile stays where it was, to be
        # passed over: so many times as `_passed` says.
        self._keyed: deque[int] = deque()
        self._passed: Counter[int] = Counter()
        self._limbo: dict[int, int] = {}  # page -> the step that must be committed first, ascending
        self._settled = 0
        self.num_free, self.num_limbo, self.peak = len(self._bare), 0, 0

    @property
    def num_used(self) -> int:
        """Pages that sequences hold, each once."""
        return max(self.num_pages - 1, 0) - self.num_free - self.num_limbo

    @property
    def num_keys(self) -> int:
        """Pages in the prefix index, held or free."""
        return len(self._by_key)

    def is_free(self, page: int) -> bool:
        """Would sharing this page leave one less to take?"""
        return page != NULL_PAGE and not self._refs[page] and page not in self._limbo

    def take(self) -> int:
        """A page with one reference and without a key. Raises KeyError if none is free."""
        return self.take_many(1)[0]

    def take_many(self, count: int) -> list[int]:
        """The same for several pages, in the order in which they would be taken one by one."""
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
        """One more holder; revives a page that nobody held."""
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
        """One holder less. The last one's page is handed out again once step `until` was committed."""
        self.drop_all((page,), until)

    def drop_all(self, pages: Iterable[int], until: int) -> None:
        """The same for several pages, one after the other."""
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
        """Step `step` was committed, and so was every one before it."""
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
        """May the holder change the page? Not if another one holds it, or may find it."""
        return self._refs[page] == 1 and self._keys[page] is None

    def seal(self, page: int, key: PageKey) -> None:
        """The page will not change any more: later sequences may find it. The first page of equal ones is kept."""
        self.seal_all((page,), (key,))

    def seal_all(self, pages: Iterable[int], keys: Iterable[PageKey]) -> None:
        """The same for several pages, one after the other."""
        of_page, by_key = self._keys, self._by_key
        for page, key in zip(pages, keys, strict=True):
            if page != NULL_PAGE and of_page[page] is None and key not in by_key:
                of_page[page] = key
                by_key[key] = page

    def find(self, key: PageKey) -> int:
        """The page that was sealed with `key`, NULL_PAGE if there is none."""
        return self._by_key.get(key, NULL_PAGE)

    def check(self, held: dict[int, int]) -> None:
        """Raises AssertionError unless references are what is `held` (page -> count) and every page is in one place."""
        runs = self._in_runs()
        counted = {page: refs for page, refs in enumerate(self._refs) if refs and page not in runs}
        assert counted == held, f"{self.name}: references are {counted}, holders {held}"
        free, limbo = self._in_full([*self._bare, *self._live_keyed()]), self._in_full(self._limbo)
        places = [*held, *free, *limbo]
        once = len(places) == len(set(places)) == max(self.num_pages - 1, 0) and NULL_PAGE not in places
        assert once, f"{self.name}: a page is lost, or in two places"
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
        """Nobody holds these any more."""
        if until > self._settled:
            self._limbo.update(dict.fromkeys(pages, until))
            self.num_limbo += len(pages)
        else:
            self._release(pages)

    def _release(self, pages: Sequence[int]) -> int:
        """The number of pages that are free now."""
        keys = self._keys
        keyed = [page for page in pages if keys[page] is not None]
        self._keyed += keyed
        if len(keyed) < len(pages):  # nothing worth keeping: the first to be reused
            self._bare += [page for page in pages if keys[page] is None]
        self.num_free += len(pages)
        return len(pages)

    def _oldest(self, count: int) -> list[int]:
        """Take so many pages off the front of those with a key."""
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
        """Free pages with a key, in order: where a page stands more than once, the last place counts."""
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
        """For a pool where a page may stand for others too."""
        return list(pages)

    def _in_runs(self) -> Set[int]:
        """Those for which others stand."""
        return frozenset()

    def _tidy(self) -> None:
        self._keyed = deque(self._live_keyed())
        self._passed.clear()

    def _note_peak(self) -> None:
        used = self.num_pages - 1 - self.num_free - self.num_limbo
        if used > self.peak:
            self.peak = used
