"""Run the real scheduler on a virtual clock: replicas, arrivals and a router, in order of time.

At each moment, first the steps that end are committed, then requests arrive, then steps begin.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from random import Random
from typing import Any

from ridgeline.errors import RequestError
from ridgeline.plan.limits import Slo
from ridgeline.sched.routing import Route, prefix_aware, round_robin
from ridgeline.sched.scheduler import Scheduler
from ridgeline.sched.stats import Stats
from ridgeline.sim.book import Book, Run
from ridgeline.sim.cost import StepCost
from ridgeline.sim.costs import CostTable
from ridgeline.sim.drafting import Drafting, Drafts
from ridgeline.sim.fast_forward import FastForwardScheduler
from ridgeline.sim.host import HostedCost, HostTimes, delayed
from ridgeline.sim.metrics import DraftsUsed, Report, Usage, report
from ridgeline.sim.replica import JumpingReplica, Replica, SteppingReplica, make_scheduler
from ridgeline.sim.settings import Settings
from ridgeline.sim.workload import Request, Workload


@dataclass(frozen=True, slots=True)
class Simulated:
    """The result of a simulation. book: all that was recorded. first_refusal: why the first request was refused."""

    report: Report
    book: Book
    first_refusal: str | None = None

    @property
    def run(self) -> Run:
        """Return the data for a picture."""
        return Run(self.report, self.book.answered(), self.book.timeline)


def simulate(
    workload: Workload,
    settings: Settings,
    cost: StepCost,
    *,
    replicas: int = 1,
    route: Route = round_robin,
    slo: Slo | None = None,
    seed: int = 0,
    every_step: bool = False,
    drafts: Drafts | None = None,
    on_over: Callable[[], None] = lambda: None,
    host: HostTimes | None = None,
) -> Simulated:
    """Run a workload to its end. every_step: plan every step in full, which takes longer with equal results.

    drafts: draft tokens; with them every step is planned in full. on_over: called for each request that is answered or
    refused. host: times of the host's work besides steps. Raises RequestError if no request fits.
    """
    waits: Sequence[int] = ()
    if host is not None:
        waits, cost = host.waits_ns(workload), HostedCost(cost, host)
        workload = delayed(workload, waits)
    one = _Simulation(workload, settings, cost, replicas, route, seed, every_step, drafts, on_over)
    return one.run(slo, waits)


class _Simulation:
    def __init__(
        self, workload: Workload, settings: Settings, cost: StepCost, replicas: int, route: Route, seed: int,
        every_step: bool, drafts: Drafts | None, on_over: Callable[[], None],
    ) -> None:  # fmt: skip
        if replicas < 1:
            raise RequestError(f"--replicas {replicas}; it must be at least 1")
        self._workload, self._settings, self._route = workload, settings, route
        self._book = Book(replicas)
        costs = CostTable(cost)
        self._replicas: list[Replica[Any]] = []
        for i in range(replicas):
            drafting = Drafting(drafts, costs, seed) if drafts else None
            self._replicas.append(
                SteppingReplica(i, make_scheduler(Scheduler, settings, drafting), costs, self._book, drafting)
                if every_step or drafting
                else JumpingReplica(i, make_scheduler(FastForwardScheduler, settings), costs, self._book)
            )
        self._chance, self._on_over = Random(seed), on_over
        self._ends: list[tuple[int, int]] = []  # a heap of (end of a step, replica); some are out of date
        self._refused = 0
        self._first_refusal: str | None = None

    def run(self, slo: Slo | None, waits_ns: Sequence[int]) -> Simulated:
        self._book.waits_ns = waits_ns
        arrivals = _Arrivals(self._workload)
        while self._ends or arrivals:
            now = min(arrivals.next_ns, self._ends[0][0]) if self._ends else arrivals.next_ns
            touched = self._complete(now, arrivals)
            for index, request in arrivals.until(now):
                touched |= self._arrive(index, request, now, arrivals)
            for i in sorted(touched):
                replica = self._replicas[i]
                replica.begin(now)
                if replica.end_ns is not None:
                    heapq.heappush(self._ends, (replica.end_ns, i))
        for replica in self._replicas:
            replica.check()
        if self._first_refusal and self._refused == arrivals.count:
            raise RequestError(f"no request fits: {self._first_refusal}")
        return Simulated(report(self._book.answered(), self._usage(), slo), self._book, self._first_refusal)

    def _complete(self, now: int, arrivals: _Arrivals) -> set[int]:
        """Commit the steps that end now; their replicas."""
        touched = set()
        while self._ends and self._ends[0][0] == now:
            _, i = heapq.heappop(self._ends)
            replica = self._replicas[i]
            if replica.end_ns == now:
                for _ in replica.complete():
                    arrivals.answered(now)
                    self._on_over()
                touched.add(i)
        return touched

    def _arrive(self, index: int, request: Request, now: int, arrivals: _Arrivals) -> set[int]:
        if self._route is prefix_aware:
            for replica in self._replicas:
                replica.catch_up(now)
        i = self._route(request, self._replicas, index, self._chance)
        try:
            self._check_length(request)
            self._replicas[i].add(index, request, now)
        except RequestError as e:
            self._refused += 1
            self._first_refusal = self._first_refusal or str(e)
            arrivals.answered(now)
            self._on_over()
            return set()
        return {i}

    def _check_length(self, request: Request) -> None:
        limit = self._settings.max_model_len
        if request.prompt_tokens + request.output_tokens > limit:
            raise RequestError(
                f"the prompt's {request.prompt_tokens} tokens and {request.output_tokens} to generate exceed the "
                f"context of {limit}"
            )

    def _usage(self) -> Usage:
        logs, stats = self._book.logs, [replica.stats() for replica in self._replicas]
        return Usage(
            steps=sum(len(log.ends) for log in logs),
            busy_ns=sum(log.busy for log in logs),
            batch_ns=sum(log.batch for log in logs),
            waiting_ns=sum(log.waiting for log in logs),
            byte_ns=sum(log.size for log in logs),
            peak_bytes=max(log.peak for log in logs),
            state_bytes=self._settings.state_bytes,
            queried_tokens=sum(s.queried_tokens for s in stats),
            hit_tokens=sum(s.hit_tokens for s in stats),
            preemptions=sum(s.preempted_recompute + s.preempted_swap for s in stats),
            refused=self._refused,
            replicas=len(self._replicas),
            drafts=self._drafts_used(stats),
        )

    def _drafts_used(self, stats: Sequence[Stats]) -> DraftsUsed | None:
        """Return what was drafted and accepted on all replicas; None without drafts."""
        if self._replicas[0].drafting is None:
            return None
        busy = sum(log.busy for log in self._book.logs)
        drafting = sum(log.drafting for log in self._book.logs) / busy if busy else 0.0
        return DraftsUsed.of([s.drafts for s in stats], drafting)


class _Arrivals:
    """Requests in order of arrival: at their own times or, with clients, one after each answer."""

    def __init__(self, workload: Workload) -> None:
        self._rest: Iterator[tuple[int, Request]] = iter(enumerate(workload.requests))
        self._think, self._is_closed = workload.think_ns, workload.clients is not None
        self.count = 0
        self._queue: list[tuple[int, Request]] = []  # in order of arrival; all clients wait equally long
        if workload.clients is not None:
            for index, request in islice(self._rest, workload.clients):
                self._queue.append((index, request._replace(arrival_ns=0)))
        self._at = 0
        self._pull()

    def __bool__(self) -> bool:
        return self._at < len(self._queue)

    @property
    def next_ns(self) -> int:
        return self._queue[self._at][1].arrival_ns if self else 1 << 62

    def until(self, now: int) -> Iterator[tuple[int, Request]]:
        """Yield the requests that arrive by now."""
        while self and self._queue[self._at][1].arrival_ns <= now:
            found = self._queue[self._at]
            self._at += 1
            self.count += 1
            if self._at == len(self._queue):
                self._queue.clear()
                self._at = 0
            self._pull()
            yield found

    def answered(self, now: int) -> None:
        """Let a client that has its answer send its next request."""
        if self._is_closed:
            for index, request in islice(self._rest, 1):
                self._queue.append((index, request._replace(arrival_ns=now + self._think)))

    def _pull(self) -> None:
        if not self._is_closed and not self:
            for pair in islice(self._rest, 1):
                self._queue.append(pair)
