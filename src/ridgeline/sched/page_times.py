"""Measure how long pages stay in the prefix index and how long they are idle: they show whether it is too small."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from ridgeline.sched.counts import Histogram

Clock = Callable[[], float]  # seconds
# Upper bounds of the histograms in seconds, as in vLLM.
SECONDS = (
    0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0,
    1200.0, 1800.0,
)  # fmt: skip


@dataclass(slots=True)
class PageTimes:
    """Histograms of times of pages of all groups, in seconds.

    lifetime: from when a page of the prefix index was taken to when it was handed out again. idle: from when its last
    holder released it to when it was handed out again. reuse_gap: time between two uses of a page: taken or shared.
    """

    lifetime: Histogram = field(default_factory=lambda: Histogram(SECONDS))
    idle: Histogram = field(default_factory=lambda: Histogram(SECONDS))
    reuse_gap: Histogram = field(default_factory=lambda: Histogram(SECONDS))


class PageLifetimes:
    """Measures the times of one pool's pages."""

    __slots__ = ("_clock", "_left", "_taken", "_times", "_used")

    def __init__(self, num_pages: int, clock: Clock, times: PageTimes) -> None:
        self._clock, self._times = clock, times
        self._taken, self._used, self._left = ([0.0] * num_pages for _ in range(3))

    def evict(self, pages: Iterable[int]) -> None:
        """Record that pages were removed from the prefix index."""
        now, times = self._clock(), self._times
        for page in pages:
            times.lifetime.observe(now - self._taken[page])
            times.idle.observe(now - self._left[page])

    def take(self, pages: Iterable[int]) -> None:
        """Record that pages were taken."""
        now = self._clock()
        for page in pages:
            self._taken[page] = self._used[page] = now

    def use(self, page: int) -> None:
        """Record that a page has one more holder."""
        now = self._clock()
        self._times.reuse_gap.observe(now - self._used[page])
        self._used[page] = now

    def leave(self, pages: Iterable[int]) -> None:
        """Record that pages have no holder any more."""
        now = self._clock()
        for page in pages:
            self._left[page] = now
