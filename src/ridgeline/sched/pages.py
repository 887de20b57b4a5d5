"""A pool of page ids: reference counts, the free list in eviction order, and the prefix index.

A page is always in exactly one state:

    take()           held by sequences,             drop(), last one         waiting for a step that may touch it
    free ----------> num references >= 1 ----------------------------------> limbo (until step n)
      ^                      ^   share(): a prefix hit takes it back            |
      |                      +--------------------------------------------------+
      +-------------------------------------------------------------------------+  settle(n): step n was committed

A free page keeps its contents and its key until it is handed out again, so `find` may return it. Free pages are handed
out in this order:

    1. used pages without a key: nobody can find them
    2. pages with a key, the least recently used first, while more than `keep` of them are free
    3. fresh pages, which were never used: the system must provide and clear their memory
    4. the other pages with a key, the least recently used first

So a fresh page is taken only when the used ones are held, in limbo, or among the `keep` that stay. `keep` begins small
and follows what prompts look for:

    it grows     While fresh pages are left, the pool stores the keys of the pages that it handed out by rule 2. If a
                 prompt looks for one of them (`missed`), so many pages are kept from then on that it would have been
                 found, and at least twice as many.
    it shrinks   An old page is one that half of `keep` might not have kept: since it was released, more than keep / 2
                 pages with a key were. If PATIENCE * keep pages with a key are released, and meanwhile no prompt uses
                 or misses an old page, `keep` is halved, down to its first value.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence, Set
from itertools import islice

from ridgeline.sched.page_times import PageLifetimes
from ridgeline.sched.sequence import PageKey
from ridgeline.spec.groups import NULL_PAGE

PATIENCE = 4  # times `keep` pages are released before `keep` shrinks


class PagePool:
    """Manages pages 1 to num_pages - 1 of one state group on the device, or of its swap space on the host.

    num_free: pages that can be taken now. num_limbo: pages that nobody holds and that a step in flight may still touch.
    num_fresh: free pages that were never used. keep: free pages with a key that stay while there are fresh pages. peak:
    the highest num_used so far. residency: measures the lifetimes of pages; None: they are not measured.
    """

    __slots__ = (
        "_bare", "_by_key", "_evicted", "_gone", "_keyed", "_keys", "_least", "_limbo", "_passed", "_quiet_since",
        "_refs", "_released", "_released_at", "_settled", "keep", "name", "num_free", "num_fresh", "num_limbo",
        "num_pages", "peak", "residency",
    )  # fmt: skip

    def __init__(self, name: str, num_pages: int, keep: int = 0) -> None:
        self.name, self.num_pages, self.keep, self._least = name, num_pages, keep, keep
        self.residency: PageLifetimes | None = None
        self._refs = [0] * num_pages
        self._keys: list[PageKey | None] = [None] * num_pages
        self._by_key: dict[PageKey, int] = {}
        self._bare: list[int] = []  # free, used before, without a key; the last is handed out first
        # Free, with a key; the first is handed out first. A page that was shared meanwhile keeps its entries, which are
        # then skipped: `_passed` counts them.
        self._keyed: deque[int] = deque()
        self._passed: Counter[int] = Counter()
        self._limbo: dict[int, int] = {}  # page -> the step that must be committed first, ascending
        self._settled = 0
        # The keys of pages that were handed out by rule 2, and how many pages were handed out so before each of them,
        # which is `_evicted` now. The oldest comes first; those are left out that a larger `keep` could not have saved.
        self._gone: dict[PageKey, int] = {}
        self._evicted = 0
        self._released = 0  # pages with a key that were released so far
        self._released_at = [0] * num_pages  # its value when a page was released last
        self._quiet_since = 0  # its value when a prompt last used or missed an old page, or `keep` changed
        # Fresh pages are the last num_fresh ones, and the first of them is handed out first.
        self.num_free = self.num_fresh = max(num_pages - 1, 0)
        self.num_limbo = self.peak = 0

    @property
    def num_used(self) -> int:
        """Return the number of pages that sequences hold; a shared page counts once."""
        return max(self.num_pages - 1, 0) - self.num_free - self.num_limbo

    @property
    def num_keys(self) -> int:
        """Return the number of pages in the prefix index, held or free."""
        return len(self._by_key)

    @property
    def num_kept(self) -> int:
        """Return the number of free pages with a key."""
        return self.num_free - self.num_fresh - len(self._bare)

    def is_free(self, page: int) -> bool:
        """Return whether the page is on the free list."""
        return page != NULL_PAGE and not self._refs[page] and page not in self._limbo

    def take(self) -> int:
        """Take a free page: it has one reference and no key. Raises KeyError if none is free."""
        return self.take_many(1)[0]

    def take_many(self, count: int) -> list[int]:
        """Take the free pages that as many calls of `take` would return, perhaps in another order."""
        if count > self.num_free:
            raise KeyError(f"{self.name}: {count} pages, and {self.num_free} are free")
        refs, bare = self._refs, self._bare
        evicted = max(self._num_evicted(count), 0)
        fresh = max(count - len(bare) - evicted, 0)
        start = max(len(bare) - count, 0)
        taken = bare[start:]
        taken.reverse()
        del bare[start:]
        if evicted:
            taken += self._evict(evicted, store=fresh < self.num_fresh)
        if fresh:
            first = self.num_pages - self.num_fresh
            taken += range(first, first + fresh)
            self.num_fresh -= fresh
        if self._gone:
            self._forget()
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
                if self._released - self._released_at[page] > self.keep // 2:
                    self._quiet_since = self._released
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

    def has(self, key: PageKey) -> bool:
        """Return whether a page was sealed with `key`."""
        return key in self._by_key

    def knows(self, key: PageKey) -> bool:
        """Return whether the page of `key` is in the prefix index, or would be with a larger `keep`."""
        return key in self._by_key or key in self._gone

    @property
    def has_gone(self) -> bool:
        """Return whether it knows keys that are not in the prefix index any more."""
        return bool(self._gone)

    def missed(self, key: PageKey) -> None:
        """Keep more pages from now on if a larger `keep` would have kept the page of `key`: twice as many, or more."""
        before = self._gone.pop(key, None)
        if before is None:
            return
        self._quiet_since = self._released
        enough = self.num_kept + self._evicted - before
        if enough > self.keep:
            self.keep = max(enough, 2 * self.keep)

    def check(self, held: dict[int, int]) -> None:
        """Raise AssertionError unless references equal `held` (page -> count) and every page is in one state."""
        runs = self._in_runs()
        counted = {page: refs for page, refs in enumerate(self._refs) if refs and page not in runs}
        assert counted == held, f"{self.name}: references are {counted}, holders {held}"
        fresh = range(self.num_pages - self.num_fresh, self.num_pages)
        free, limbo = self._in_full([*self._bare, *self._live_keyed(), *fresh]), self._in_full(self._limbo)
        pages = [*held, *free, *limbo]
        once = len(pages) == len(set(pages)) == max(self.num_pages - 1, 0) and NULL_PAGE not in pages
        assert once, f"{self.name}: a page is lost, or in two states"
        counts = (self.num_free, self.num_limbo)
        assert counts == (len(free), len(limbo)), (
            f"{self.name}: free and in limbo {len(free), len(limbo)}, not {counts}"
        )
        apart = not any(map(self._has_key, (*self._bare, *fresh))) and all(
            map(self._has_key, {*self._live_keyed()} - runs)
        )
        assert apart, f"{self.name}: a free page is on the wrong side of the index"
        assert all(self._keys[page] == key for key, page in self._by_key.items()), f"{self.name}: stale index"
        assert sum(key is not None for key in self._keys) == len(self._by_key), f"{self.name}: unindexed key"
        gone = list(self._gone.values())
        recent = gone == sorted(gone) and (not gone or gone[0] >= self._evicted - self.num_fresh)
        assert recent, f"{self.name}: it stores keys for too long"
        limits = list(self._limbo.values())
        assert limits == sorted(limits), f"{self.name}: limbo out of order"

    def _num_evicted(self, count: int) -> int:
        """Return how many of the next `count` pages are taken from the prefix index, or 0 or less."""
        needed = count - len(self._bare)
        return max(min(needed, self.num_kept - self.keep), needed - self.num_fresh)

    def _evict(self, count: int, *, store: bool) -> list[int]:
        """Remove the `count` least recently used pages from the free list and from the prefix index."""
        keys, evicted = self._keys, self._oldest(count)
        if self.residency is not None:
            self.residency.evict(evicted)
        for number, page in enumerate(evicted, self._evicted):
            key = keys[page]
            if key is not None:
                del self._by_key[key]
                keys[page] = None
                if store:
                    self._gone.pop(key, None)
                    self._gone[key] = number
        self._evicted += count
        return evicted

    def _forget(self) -> None:
        """Forget keys of pages that would not be kept even if there were no fresh pages left."""
        gone, first = self._gone, self._evicted - self.num_fresh
        while gone and gone[key := next(iter(gone))] < first:
            del gone[key]

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
        self._note_released(keyed, len(keyed))
        return len(pages)

    def _note_released(self, pages: Iterable[int], count: int) -> None:
        """Count `count` released pages with a key; prompts can find `pages` of them. Shrink `keep` if it is time."""
        self._released += count
        for page in pages:
            self._released_at[page] = self._released
        if self._released - self._quiet_since >= PATIENCE * self.keep > PATIENCE * self._least:
            self.keep = max(self.keep // 2, self._least)
            self._quiet_since = self._released

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
