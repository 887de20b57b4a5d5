"""Times of pages on a clock that the test sets: taken, used again, freed, overwritten."""

from __future__ import annotations

import math
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from ridgeline.sched.counts import Histogram
from ridgeline.sched.page_times import PageLifetimes, PageTimes
from ridgeline.sched.pages import PagePool


class Watched:
    """A pool with a number of pages, its clock, and its counts."""

    def __init__(self, pages: int) -> None:
        self.now, self.times = 0.0, PageTimes()
        self.pool = PagePool("kv", pages + 1)
        self.pool.residency = PageLifetimes(pages + 1, lambda: self.now, self.times)

    def counts(self) -> tuple[tuple[int, float], ...]:
        times = self.times
        return tuple((sum(h.counts), h.sum) for h in (times.lifetime, times.idle, times.reuse_gap))


def test_the_times_of_a_page() -> None:
    w = Watched(1)
    page = w.pool.take()
    w.pool.seal(page, b"a")
    w.now = 3.0
    w.pool.share(page)  # another request gets a prefix hit
    w.now = 4.0
    w.pool.drop(page, until=0)
    assert w.counts() == ((0, 0.0), (0, 0.0), (1, 3.0))
    w.now = 5.0
    w.pool.drop(page, until=0)
    w.now = 9.0
    w.pool.share(page)  # used again after it was freed
    w.pool.drop(page, until=0)
    w.now = 16.0
    assert w.pool.take() == page  # overwritten
    assert w.counts() == ((1, 16.0), (1, 7.0), (2, 9.0))


def test_pages_without_a_hash_have_no_times() -> None:
    w = Watched(2)
    for _ in range(5):
        page = w.pool.take()
        w.now += 1.0
        w.pool.drop(page, until=0)
    assert w.counts() == ((0, 0.0),) * 3


@given(st.lists(st.floats(0, 5000), max_size=40))
def test_a_histogram_counts_up_to_and_with_its_bounds(values: list[float]) -> None:
    found = Histogram((0.0, 1.0, 60.0))
    for value in values:
        found.observe(value)
    edges = (-math.inf, 0.0, 1.0, 60.0, math.inf)
    assert found.counts == [sum(a < v <= b for v in values) for a, b in pairwise(edges)]
    assert math.isclose(found.sum, sum(values))
