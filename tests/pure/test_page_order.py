"""The order in which free pages are handed out, against a pool that keeps plain lists; planted bugs must be found."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.sched import Result, Scheduler, Sequence
from ridgeline.sched.pages import PagePool
from ridgeline.spec.groups import KEPT_TOKENS, StateGroup
from ridgeline.spec.state import ALL

# Each event is a kind and a number, which chooses a page or a key.
EVENTS = st.lists(st.tuples(st.sampled_from(("take", "drop", "seal", "find", "miss")), st.integers(0, 30)), max_size=80)


class Lists:
    """The rules of sched/pages.py with a list for each kind of free page."""

    def __init__(self, pages: int, keep: int) -> None:
        self.fresh, self.bare, self.kept = list(range(1, pages)), list[int](), list[int]()
        self.keys, self.held = dict[int, bytes](), dict[int, int]()
        self.gone, self.keep, self.least = list[bytes](), keep, keep
        self.released, self.quiet_since = list[int](), 0  # pages with a key in the order in which they were released
        self.ever = 0  # the most pages that were held, or among those that stay, at one time

    def take(self) -> int:
        if self.bare:
            page = self.bare.pop()
        elif self.fresh and len(self.kept) <= self.keep:
            page = self.fresh.pop(0)
        else:
            page = self.kept.pop(0)
            self.gone.append(self.keys.pop(page))
        self.held[page] = 1
        self.ever = max(self.ever, len(self.held) + self.keep)
        return page

    def drop(self, page: int) -> None:
        self.held[page] -= 1
        if not self.held[page]:
            del self.held[page]
            (self.kept if page in self.keys else self.bare).append(page)
            if page in self.keys:
                self.released.append(page)
                self.shrink()

    def find(self, key: bytes) -> int:
        page = next((p for p, k in self.keys.items() if k == key), 0)
        if page in self.kept and self.released[::-1].index(page) > self.keep // 2:
            self.quiet_since = len(self.released)
        if page:
            self.kept = [p for p in self.kept if p != page]
            self.held[page] = self.held.get(page, 0) + 1
            self.ever = max(self.ever, len(self.held) + self.keep)
        return page

    def shrink(self) -> None:
        """Halve what stays if the last 4 * keep releases came without a look at an old page."""
        if self.keep > self.least and len(self.released) - self.quiet_since >= 4 * self.keep:
            self.keep, self.quiet_since = max(self.keep // 2, self.least), len(self.released)

    def miss(self, key: bytes) -> None:
        """Grow if the page of `key` was handed out so lately that the fresh pages would have saved it."""
        late = self.gone[::-1].index(key) + 1 if key in self.gone else 0
        if late:
            self.gone[len(self.gone) - late] = b""
        if 0 < late <= len(self.fresh):
            self.quiet_since = len(self.released)
        if 0 < late <= len(self.fresh) and len(self.kept) + late > self.keep:
            self.keep = max(len(self.kept) + late, 2 * self.keep)


def compare(pages: int, keep: int, events: list[tuple[str, int]]) -> None:
    pool, lists = PagePool("kv", pages, keep), Lists(pages, keep)
    for kind, number in events:
        held, key = sorted(lists.held), b"%d" % (number % 7)
        page = held[number % len(held)] if held else 0
        if kind == "take" and pool.num_free:
            assert pool.take() == lists.take()
        elif kind == "drop" and held:
            pool.drop(page, until=0)
            lists.drop(page)
        elif kind == "seal" and held and page not in lists.keys and key not in lists.keys.values():
            pool.seal(page, key)
            lists.keys[page] = key
        elif kind == "find":
            found = lists.find(key)
            assert pool.find(key) == found
            if found:
                pool.share(found)
        elif kind == "miss" and not pool.has(key):
            pool.missed(key)
            lists.miss(key)
        assert (pool.num_fresh, pool.num_kept, pool.keep) == (len(lists.fresh), len(lists.kept), lists.keep)
        assert pages - 1 - pool.num_fresh <= lists.ever, "more pages were used than the bound says"
        pool.check(lists.held)


@given(st.integers(2, 24), st.integers(0, 8), EVENTS)
@settings(max_examples=300, deadline=None)
def test_the_pool_follows_the_rules(pages: int, keep: int, events: list[tuple[str, int]]) -> None:
    compare(pages, keep, events)


@given(st.integers(1, 30), st.integers(0, 8), st.lists(st.integers(1, 9), max_size=6))
def test_many_pages_at_once_are_those_of_single_calls(pages: int, keep: int, counts: list[int]) -> None:
    many, single = PagePool("kv", pages, keep), PagePool("kv", pages, keep)
    for pool in (many, single):  # half of the pages were used and have keys
        used = pool.take_many((pages - 1) // 2)
        pool.seal_all(used, [b"%d" % page for page in used])
        pool.drop_all(used, until=0)
    for count in counts:
        if count <= many.num_free:
            assert sorted(many.take_many(count)) == sorted(single.take() for _ in range(count))


def fresh_first(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PagePool, "_num_evicted", lambda pool, count: count - len(pool._bare) - pool.num_fresh)


def one_too_many_is_kept(patch: pytest.MonkeyPatch) -> None:
    before = PagePool._num_evicted
    patch.setattr(PagePool, "_num_evicted", lambda pool, count: before(pool, count) - (pool.num_kept == pool.keep + 1))


def nothing_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PagePool, "_forget", lambda pool: None)


def the_bound_never_grows(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PagePool, "missed", lambda pool, key: None)


def the_bound_never_shrinks(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("ridgeline.sched.pages.PATIENCE", 10**9)


def the_bound_shrinks_too_soon(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("ridgeline.sched.pages.PATIENCE", 3)


def old_pages_do_not_count(patch: pytest.MonkeyPatch) -> None:
    def share(pool: PagePool, page: int) -> None:
        pool._released_at[page] = pool._released
        before(pool, page)

    before = PagePool.share
    patch.setattr(PagePool, "share", share)


BUGS = [
    fresh_first, one_too_many_is_kept, nothing_is_forgotten, the_bound_never_grows, the_bound_never_shrinks,
    the_bound_shrinks_too_soon, old_pages_do_not_count,
]  # fmt: skip


@pytest.mark.parametrize("bug", BUGS)
def test_a_bug_shows(bug: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    bug(monkeypatch)
    for seed in range(300):
        rng = random.Random(seed)
        events = [(rng.choice(("take", "drop", "seal", "find", "miss")), rng.randrange(31)) for _ in range(400)]
        try:
            compare(rng.randint(2, 24), rng.randint(0, 8), events)
        except (AssertionError, IndexError, KeyError):
            return
    pytest.fail("the comparison did not find the bug")


def answer(scheduler: Scheduler, number: int, prompt: list[int]) -> int:
    """Run a request with one token to its end; the tokens of its prompt that were found in the prefix cache."""
    sequence = Sequence(number, prompt, 1)
    scheduler.add(sequence)
    while len(scheduler):
        plan = scheduler.schedule()
        assert plan is not None
        scheduler.commit(plan, [Result((7,)) if work.sample else Result() for work in plan.works])
    scheduler.check()
    return sequence.num_cached


def test_different_prompts_use_few_pages_and_repeated_ones_are_kept() -> None:
    length, group = 512, StateGroup("kv", 16, ALL, 1)
    scheduler = Scheduler([group], [10_001], max_batch_tokens=256, max_seqs=4)
    pool = scheduler._cache.pools[0]
    for i in range(200):
        assert answer(scheduler, i, [i, *range(length - 1)]) == 0
    used = pool.num_pages - 1 - pool.num_fresh
    assert used <= (length + KEPT_TOKENS) // 16 + 1
    # Eight prompts that come in turn do not fit into the kept pages: the pool learns it from the second turn.
    turns = [[answer(scheduler, 1000 * t + i, [1000 + i, *range(length - 1)]) for i in range(8)] for t in range(1, 5)]
    assert turns[0] == [0] * 8
    assert turns[2] == turns[3] == [length - 16] * 8
    assert pool.num_pages - 1 - pool.num_fresh <= 4 * 8 * length // 16


def test_the_bound_shrinks_when_prompts_stop_looking_for_old_pages() -> None:
    """While prompts come back in turn, the bound stays. After many new ones it is the first one, and then many prompts
    at once use old pages instead of memory that was never used.
    """
    group = StateGroup("kv", 64, ALL, 1)
    scheduler = Scheduler([group], [1001], max_batch_tokens=512, max_seqs=16)
    pool, numbers = scheduler._cache.pools[0], itertools.count()

    def ask(first: int) -> int:
        return answer(scheduler, next(numbers), [first, *range(256)])

    for _ in range(2):
        for i in range(8):  # 32 pages, and 16 stay at first
            ask(i)
    grown = pool.keep
    assert group.kept_pages == 16 < grown <= 64
    assert [ask(i) for _ in range(12) for i in range(8)] == [256] * 96
    assert pool.keep == grown, "prompts look for old pages still"
    for i in range(8 * grown // 4):
        ask(1000 + i)
    assert pool.keep == group.kept_pages
    fresh = pool.num_fresh
    for i in range(4):  # they hold 20 pages at once, and 16 more may stay
        scheduler.add(Sequence(next(numbers), [2000 + i, *range(256)], 1))
    while len(scheduler):
        plan = scheduler.schedule()
        assert plan is not None
        scheduler.commit(plan, [Result((7,)) if work.sample else Result() for work in plan.works])
    assert pool.num_fresh == fresh
