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

from collections import OrderedDict
from collections.abc import Iterable

from ridgeline.sched.sequence import PageKey
from ridgeline.spec.groups import NULL_PAGE


class PagePool:
    """Pages 1 to num_pages - 1 of one state group on the device, or of its swap space on the host."""

    __slots__ = ("_by_key", "_free", "_keys", "_limbo", "_refs", "_settled", "name", "num_pages", "peak")

    def __init__(self, name: str, num_pages: int) -> None:
        self.name, self.num_pages = name, num_pages
        self.peak = 0  # of num_used, since the start
        self._refs = [0] * num_pages
        self._keys: list[PageKey | None] = [None] * num_pages
        self._by_key: dict[PageKey, int] = {}
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(NULL_PAGE + 1, num_pages))
        self._limbo: OrderedDict[int, int] = OrderedDict()  # page -> the step that must be committed first, ascending
        self._settled = 0

    @property
    def num_free(self) -> int:
        """Pages that can be taken now."""
        return len(self._free)

    @property
    def num_limbo(self) -> int:
        """Pages that nobody holds and that a step in flight may still touch."""
        return len(self._limbo)

    @property
    def num_used(self) -> int:
        """Pages that sequences hold, each once."""
        return max(self.num_pages - 1, 0) - len(self._free) - len(self._limbo)

    @property
    def num_keys(self) -> int:
        """Pages in the prefix index, held or free."""
        return len(self._by_key)

    def is_free(self, page: int) -> bool:
        """Would sharing this page leave one less to take?"""
        return page in self._free

    def take(self) -> int:
        """A page with one reference and without a key. Raises KeyError if none is free."""
        return self.take_many(1)[0]

    def take_many(self, count: int) -> list[int]:
        """The same for several pages, in the order in which they would be taken one by one."""
        pop, keys, refs, by_key = self._free.popitem, self._keys, self._refs, self._by_key
        taken = [pop(False)[0] for _ in range(count)]
        for page in taken:
            refs[page] = 1
            key = keys[page]
            if key is not None:
                del by_key[key]
                keys[page] = None
        used = self.num_pages - 1 - len(self._free) - len(self._limbo)
        if used > self.peak:
            self.peak = used
        return taken

    def share(self, page: int) -> None:
        """One more holder; revives a page that nobody held."""
        if not self._refs[page]:
            if page in self._free:
                del self._free[page]
            else:
                del self._limbo[page]
            self.peak = max(self.peak, self.num_used)
        self._refs[page] += 1

    def drop(self, page: int, until: int) -> None:
        """One holder less. The last one's page is handed out again once step `until` was committed."""
        self.drop_all((page,), until)

    def drop_all(self, pages: Iterable[int], until: int) -> None:
        """The same for several pages, one after the other."""
        refs, waits, limbo = self._refs, until > self._settled, self._limbo
        for page in pages:
            if page == NULL_PAGE:
                continue
            left = refs[page] = refs[page] - 1
            if left > 0:
                continue
            assert not left, f"{self.name}: page {page} dropped twice"
            if waits:
                limbo[page] = until
            else:
                self._release((page,))

    def settle(self, step: int) -> None:
        """Step `step` was committed, and so was every one before it."""
        self._settled = step
        limbo = self._limbo
        if not limbo:
            return
        due = [page for page, until in limbo.items() if until <= step]
        if len(due) == len(limbo):
            limbo.clear()
        else:
            for page in due:
                del limbo[page]
        self._release(due)

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
        counted = {page: refs for page, refs in enumerate(self._refs) if refs}
        assert counted == held, f"{self.name}: references are {counted}, holders {held}"
        places = [*held, *self._free, *self._limbo]
        once = len(places) == len(set(places)) == max(self.num_pages - 1, 0) and NULL_PAGE not in places
        assert once, f"{self.name}: a page is lost, or in two places"
        assert all(self._keys[page] == key for key, page in self._by_key.items()), f"{self.name}: stale index"
        assert sum(key is not None for key in self._keys) == len(self._by_key), f"{self.name}: unindexed key"
        limits = list(self._limbo.values())
        assert limits == sorted(limits), f"{self.name}: limbo out of order"

    def _release(self, pages: Iterable[int]) -> None:
        free, keys = self._free, self._keys
        for page in pages:
            free[page] = None
            if keys[page] is None:  # nothing worth keeping: the first to be reused
                free.move_to_end(page, last=False)
