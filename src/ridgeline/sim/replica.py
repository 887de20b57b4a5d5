"""One engine on the virtual clock: its scheduler, and the step that is under way.

    add(..)       a request arrives; it is looked at when the next step begins
    begin(now)    begin a step if none is under way and there is something to run
    end_ns        when the step is over (None: there is none); then
    complete()    what it gave is committed

SteppingReplica plans every step; JumpingReplica takes many at once where nothing can happen in between, which gives the
same (tests/pure/test_sim_jump.py). A request that arrives while steps are jumped over cuts the jump.
"""

from __future__ import annotations

from bisect import bisect_left
from functools import lru_cache
from typing import Any, Generic, TypeVar

import numpy as np

from ridgeline.sched.scheduler import Scheduler
from ridgeline.sched.work import Result, StepPlan
from ridgeline.sim.book import Book, Open
from ridgeline.sim.cost import StepCost
from ridgeline.sim.fast_forward import FastForwardScheduler
from ridgeline.sim.metrics import Ints
from ridgeline.sim.sequence import counted_sequence
from ridgeline.sim.settings import Settings
from ridgeline.sim.workload import SECOND, Request

TOKEN, NOTHING = Result((0,)), Result()
LONGEST_JUMP = 64  # steps: what a jump that is cut short has cost in vain
TABLE_BLOCK = 4096  # contexts
NOBODY = 1 << 62  # no request has this number, so none has its pages
PROMPTS_KEPT = 1 << 16  # chunks of prompts, each by its tokens and its context

S = TypeVar("S", bound=Scheduler)


class CostTable:
    """A cost, with what it says of one token kept for every context up to the longest that was asked for."""

    def __init__(self, cost: StepCost) -> None:
        self.cost = cost
        self._of_prompt = lru_cache(PROMPTS_KEPT)(cost.of)
        self._rows = [(0,) * len(cost.of(1, 1))]  # by context
        self._table = np.array(self._rows, np.int64).T  # [numbers, contexts]

    def of(self, tokens: int, context: int) -> tuple[int, ...]:
        """cost.of."""
        if tokens > 1:
            return self._of_prompt(tokens, context)
        if context >= len(self._rows):
            self._extend(context)
        return self._rows[context]

    def sums(self, contexts: Ints) -> Ints:
        """[numbers, steps] for contexts [sequences, steps]."""
        while True:
            try:
                found: Ints = np.add.reduce(self._table.take(contexts, axis=1), axis=1)
            except IndexError:
                self._extend(int(contexts.max()))
            else:
                return found

    def _extend(self, longest: int) -> None:
        until = (longest // TABLE_BLOCK + 1) * TABLE_BLOCK
        self._rows += [self.cost.of(1, context) for context in range(len(self._rows), until)]
        self._table = np.array(self._rows, np.int64).T.copy()


class Replica(Generic[S]):
    """What both kinds share. index: among the replicas."""

    def __init__(self, index: int, scheduler: S, costs: CostTable, book: Book) -> None:
        self.index, self._scheduler, self._costs, self._book = index, scheduler, costs, book
        self._log = book.logs[index]
        self.open: dict[int, Open] = {}
        self.pending_tokens = 0  # of prompts whose requests have no token yet
        self.end_ns: int | None = None
        self._start = 0
        self._plan: StepPlan | None = None
        # Of the step that is under way: sequences without a work of their own, those that wait, bytes in use.
        self._beside = self._waiting = self._size = 0

    @property
    def live(self) -> int:
        """Requests that are here and not over."""
        return len(self.open)

    def cached_tokens(self, request: Request) -> int:
        """Tokens of a prompt that it would find in the prefix index."""
        return self._scheduler.cached_tokens(counted_sequence(NOBODY, request))

    def catch_up(self, now: int) -> None:
        """Bring what can be seen from outside up to `now`."""

    def add(self, index: int, request: Request, now: int) -> None:
        """Queue a request of the workload's. Raises RequestError for one that can never fit."""
        sequence = counted_sequence(index, request)
        self._scheduler.add(sequence)
        self.open[index] = Open(index, request, sequence, self.index, request.prompt_tokens)
        self.pending_tokens += request.prompt_tokens

    def begin(self, now: int) -> None:
        """Plan a step if none is under way; end_ns stays None where nothing can run."""
        if self.end_ns is None:
            self._start = now
            self._begin_step()

    def complete(self) -> list[Open]:
        """Commit what is under way; the requests that are over with it."""
        assert self._plan is not None and self.end_ns is not None
        plan, step = self._plan, len(self._log.ends)
        self._log.step(self._start, self.end_ns, self._beside + len(plan.works), self._waiting, self._size)
        self._plan = self.end_ns = None
        over = []
        for update in self._scheduler.commit(plan, [TOKEN if w.sample else NOTHING for w in plan.works]):
            opened = self.open[update.sequence]
            opened.take(step)
            if opened.pending:
                self.pending_tokens -= opened.pending
                opened.pending = 0
            if update.finished:
                del self.open[update.sequence]
                self._book.close(opened)
                over.append(opened)
        return over

    def check(self) -> None:
        """At the end: nothing is left, and the books of pages agree. Raises AssertionError."""
        assert not self.open and not len(self._scheduler), f"replica {self.index}: requests are left"
        self._scheduler.check()
        assert not self._scheduler.used_bytes, f"replica {self.index}: pages are lost"

    def stats(self) -> Any:
        """Of the scheduler."""
        return self._scheduler.stats()

    def _begin_step(self) -> None:
        plan = self._scheduler.schedule()
        if plan is None:
            assert not self.open, "nothing can run although requests are waiting: the scheduler is at fault"
            return
        self._beside = tokens = rows = self._num_beside()
        sums = self._sums_beside(plan.step)
        for work in plan.works:
            new = len(work.tokens)
            tokens += new
            rows += work.sample
            numbers = self._costs.of(new, work.start + new)
            sums = [a + b for a, b in zip(sums, numbers, strict=True)] if sums else list(numbers)
        seconds = self._costs.cost.seconds(tokens, rows, sums)
        self._plan, self._size = plan, self._scheduler.used_bytes
        self._waiting = len(self._scheduler) - self._beside - len(plan.works)
        self.end_ns = self._start + max(1, round(seconds * SECOND))

    def _num_beside(self) -> int:
        """Sequences that decode in this step without a work of their own."""
        return 0

    def _sums_beside(self, step: int) -> list[int]:
        """What they add to its sums; empty where there are none."""
        return []


class SteppingReplica(Replica[Scheduler]):
    """Plans every step in full: the definition."""


class JumpingReplica(Replica[FastForwardScheduler]):
    """Leaves alone what only decodes, and jumps over steps in which nothing else happens."""

    def __init__(self, index: int, scheduler: FastForwardScheduler, costs: CostTable, book: Book) -> None:
        super().__init__(index, scheduler, costs, book)
        self._ends: list[int] = []  # of the steps of a jump that are not yet taken

    def catch_up(self, now: int) -> None:
        """Take the steps of a jump that began before `now`."""
        if self._ends and self._start < now:
            self._take(bisect_left(self._ends, now) + 1)

    def add(self, index: int, request: Request, now: int) -> None:
        super().add(index, request, now)
        if self._ends:  # the step that is under way is the last one
            del self._ends[bisect_left(self._ends, now) + 1 if self._start < now else 0 :]
            self.end_ns = self._ends[-1] if self._ends else self._start

    def complete(self) -> list[Open]:
        if self._plan is not None:
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
        batch = self._beside = scheduler.num_fast_forwarded
        seconds = self._costs.cost.seconds(batch, batch, self._sums(scheduler.next_step, steps))
        times = np.maximum(1, np.rint(seconds * SECOND)).astype(np.int64)
        self._ends = (np.cumsum(times) + self._start).tolist()
        self._waiting, self.end_ns = len(scheduler) - batch, self._ends[-1]

    def _take(self, steps: int) -> None:
        """The first steps of the jump are over, or under way."""
        ends = self._ends[:steps]
        del self._ends[:steps]
        sizes = [(0, self._scheduler.used_bytes), *self._scheduler.skip(len(ends))]
        if len(sizes) > 1 and sizes[1][0] == 0:
            del sizes[0]
        self._log.calm(self._start, ends, self._beside, self._waiting, sizes)
        self._start = ends[-1]

    def _num_beside(self) -> int:
        return self._scheduler.num_fast_forwarded

    def _sums_beside(self, step: int) -> list[int]:
        found: list[int] = self._sums(step, 1)[:, 0].tolist() if self._beside else []
        return found

    def _sums(self, step: int, count: int) -> Ints:
        """[numbers, steps] of those that cruise, in `count` steps from one on."""
        offsets = np.frombuffer(self._scheduler.offsets, np.int64, self._beside)
        return self._costs.sums(offsets[:, None] + np.arange(step, step + count))


def make_scheduler(kind: type[S], settings: Settings) -> S:
    """With the settings of a replica."""
    return kind(
        settings.groups,
        settings.num_pages,
        max_batch_tokens=settings.max_num_batched_tokens,
        max_seqs=settings.max_num_seqs,
        regimes=settings.regimes,
    )
