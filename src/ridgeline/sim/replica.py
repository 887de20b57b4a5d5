"""One engine on the virtual clock: its scheduler, and the step in flight.

    add(..)       a request arrives; the next step may run it
    begin(now)    schedule and submit a step, if none is in flight and something can run
    end_ns        the time when the step is over; None: there is no step
    complete()    collect and commit the step

SteppingReplica plans every step. JumpingReplica skips steps in which nothing is decided (fast forward), with the same
results (tests/pure/test_sim_jump.py). A request that arrives while steps are skipped ends the skip.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Any, Generic, TypeVar

import numpy as np

from ridgeline.sched.loop import StepLoop
from ridgeline.sched.scheduler import Scheduler
from ridgeline.sched.watcher import NO_WATCHER
from ridgeline.sim.book import Book, Open
from ridgeline.sim.costs import CostTable
from ridgeline.sim.drafting import Drafting
from ridgeline.sim.fast_forward import FastForwardScheduler
from ridgeline.sim.metrics import Ints
from ridgeline.sim.runner import Beside, ClockRunner, TimedStep, nobody
from ridgeline.sim.sequence import counted_sequence
from ridgeline.sim.settings import Settings
from ridgeline.sim.workload import SECOND, Request

LONGEST_JUMP = 64  # steps that are skipped at once; more would cost too much when a request cuts them short
NO_REQUEST = 1 << 62  # no request has this number, so none has its pages

S = TypeVar("S", bound=Scheduler)


class Replica(Generic[S]):
    """The base of both kinds of replicas. index: the number of the replica. drafting: its drafts; None without."""

    def __init__(
        self, index: int, scheduler: S, costs: CostTable, book: Book, drafting: Drafting | None = None
    ) -> None:
        self.index, self._scheduler, self._costs, self._book = index, scheduler, costs, book
        self.drafting = drafting
        self._runner = ClockRunner(costs, self._decode_beside, drafting.results if drafting else None)
        self._loop = StepLoop(scheduler, self._runner)
        self._log = book.logs[index]
        self.open: dict[int, Open] = {}
        self.pending_tokens = 0  # prompt tokens of requests without a token yet
        self.end_ns: int | None = None
        self._start = self._submitted = 0  # of the step in flight: drafts are proposed between the two
        # The step in flight: sequences that run, sequences that wait, bytes in use.
        self._batch = self._waiting = self._size = 0

    @property
    def live(self) -> int:
        """Return the number of requests that were added and are not over."""
        return len(self.open)

    def cached_tokens(self, request: Request) -> int:
        """Return how many tokens of a prompt the prefix index holds now."""
        return self._scheduler.cached_tokens(counted_sequence(NO_REQUEST, request))

    def catch_up(self, now: int) -> None:
        """Bring the state that routers see up to `now`."""

    def add(self, index: int, request: Request, now: int) -> None:
        """Queue a request. index: its number in the workload. Raises RequestError if it can never fit."""
        sequence = counted_sequence(index, request)
        self._scheduler.add(sequence)
        self.open[index] = Open(index, request, sequence, self.index, request.prompt_tokens)
        self.pending_tokens += request.prompt_tokens

    def begin(self, now: int) -> None:
        """Begin a step if none is in flight; end_ns stays None if nothing can run."""
        if self.end_ns is None:
            self._start = now
            self._begin_step()

    def complete(self) -> list[Open]:
        """Commit the step in flight; the requests that are over with it."""
        assert self.end_ns is not None
        step = len(self._log.ends)
        self._log.step(self._start, self.end_ns, self._batch, self._waiting, self._size)
        seconds, self.end_ns = (self.end_ns - self._submitted) / SECOND, None
        over = []
        plan, results = self._loop.collect()
        if self.drafting is not None:
            self.drafting.collected(plan, results, seconds)
        for update in self._loop.commit(plan, results):
            opened = self.open[update.sequence]
            opened.take(step, together=self.drafting is not None)
            if opened.pending:
                self.pending_tokens -= opened.pending
                opened.pending = 0
            if update.finished:
                del self.open[update.sequence]
                self._book.close(opened)
                over.append(opened)
        return over

    def check(self) -> None:
        """Raise AssertionError if requests are left or the bookkeeping of pages is inconsistent. To be called last."""
        assert not self.open and not len(self._scheduler), f"replica {self.index}: requests are left"
        self._scheduler.check()
        assert not self._scheduler.used_bytes, f"replica {self.index}: pages are lost"

    def stats(self) -> Any:
        """Return the statistics of the scheduler."""
        return self._scheduler.stats()

    def _begin_step(self) -> None:
        drafting_s = 0.0 if self.drafting is None else self.drafting.propose(self._scheduler)
        plan = self._loop.schedule()
        if plan is None:
            assert not self.open, "nothing can run although requests are waiting: the scheduler is at fault"
            return
        self._runner.now_ns = self._submitted = self._start + round(drafting_s * SECOND)
        self._log.add_drafting(self._submitted - self._start)
        step: TimedStep = self._loop.submit(plan, None)
        self._batch, self._size = step.beside.num_seqs + len(plan.works), self._scheduler.used_bytes
        self._waiting = len(self._scheduler) - self._batch
        self.end_ns = step.end_ns

    def _decode_beside(self, step: int) -> Beside:
        """Return the sequences that decode in a step without a Work of their own."""
        return nobody(step)


class SteppingReplica(Replica[Scheduler]):
    """Plans every step in full. This is the definition."""


class JumpingReplica(Replica[FastForwardScheduler]):
    """Fast-forwards sequences that only decode, and skips steps in which nothing else happens."""

    def __init__(self, index: int, scheduler: FastForwardScheduler, costs: CostTable, book: Book) -> None:
        super().__init__(index, scheduler, costs, book)
        self._ends: list[int] = []  # ends of the skipped steps that are not recorded yet

    def catch_up(self, now: int) -> None:
        """Record the skipped steps that began before `now`."""
        if self._ends and self._start < now:
            self._take(bisect_left(self._ends, now) + 1)

    def add(self, index: int, request: Request, now: int) -> None:
        super().add(index, request, now)
        if self._ends:  # the step in flight becomes the last one that is skipped
            del self._ends[bisect_left(self._ends, now) + 1 if self._start < now else 0 :]
            self.end_ns = self._ends[-1] if self._ends else self._start

    def complete(self) -> list[Open]:
        if len(self._loop):
            return super().complete()
        if self._ends:
            self._take(len(self._ends))
        self.end_ns = None
        return []

    def _begin_step(self) -> None:
        scheduler = self._scheduler
        steps = scheduler.calm_steps(LONGEST_JUMP)
        if not steps:
            super()._begin_step()
            return
        batch = self._batch = scheduler.num_fast_forwarded
        seconds = self._costs.cost.seconds(batch, batch, self._sums(scheduler.next_step, steps))
        times = np.maximum(1, np.rint(seconds * SECOND)).astype(np.int64)
        self._ends = (np.cumsum(times) + self._start).tolist()
        self._waiting, self.end_ns = len(scheduler) - batch, self._ends[-1]

    def _take(self, steps: int) -> None:
        """Record the first skipped steps."""
        ends = self._ends[:steps]
        del self._ends[:steps]
        sizes = [(0, self._scheduler.used_bytes), *self._scheduler.skip(len(ends))]
        if len(sizes) > 1 and sizes[1][0] == 0:
            del sizes[0]
        self._log.calm(self._start, ends, self._batch, self._waiting, sizes)
        self._start = ends[-1]

    def _decode_beside(self, step: int) -> Beside:
        count = self._scheduler.num_fast_forwarded
        return Beside(count, self._sums(step, 1)[:, 0].tolist()) if count else nobody(step)

    def _sums(self, step: int, count: int) -> Ints:
        """Return the costs [numbers, steps] of the fast-forwarded sequences in `count` steps from `step` on."""
        offsets = np.frombuffer(self._scheduler.offsets, np.int64, self._scheduler.num_fast_forwarded)
        return self._costs.sums(offsets[:, None] + np.arange(step, step + count))


def make_scheduler(kind: type[S], settings: Settings, drafting: Drafting | None = None) -> S:
    """Return a scheduler with the settings of a replica, and with its drafts."""
    return kind(
        settings.groups,
        settings.num_pages,
        max_batch_tokens=settings.max_num_batched_tokens,
        max_seqs=settings.max_num_seqs,
        regimes=settings.regimes,
        watcher=drafting or NO_WATCHER,
        lookahead=drafting.lookahead if drafting else 0,
    )
