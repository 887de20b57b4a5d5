"""Record a simulation while it runs, and return its columns at the end.

Times are whole nanoseconds, and all sums are of whole numbers, so skipping many steps at once gives equal digits. A
token's time is the end of its step, so an answer is a few runs of steps, [first, last], with one token in each step.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ridgeline.sched.sequence import Sequence as Sched
from ridgeline.sim.metrics import SECOND, Answered, Ints, Report
from ridgeline.sim.workload import Request

BUCKETS = 512  # most buckets of the timeline
FIRST_WIDTH = 1 << 20  # nanoseconds


@dataclass(slots=True)
class Open:
    """A request on a replica. index: its number in the workload. runs: first and last step of each run, flattened."""

    index: int
    request: Request
    sequence: Sched
    replica: int
    pending: int  # prompt tokens that are to be computed; 0 after its first token
    runs: list[int] = field(default_factory=list)
    recorded: int = 0  # tokens

    def take(self, step: int, *, together: bool = False) -> None:
        """Record the tokens that its sequence gained: one in `step`, and one in each step before for any more.

        together: all of them in `step`, as accepted drafts are.
        """
        gained = len(self.sequence.tokens) - self.sequence.num_prompt - self.recorded
        if together and gained > 1:
            self._take_together(step, gained)
            return
        runs = self.runs
        if not runs:
            self.runs = [step, step]
        elif step - runs[-1] == gained:
            runs[-1] = step
        else:
            runs[-1] += gained - 1
            runs += (step, step)
        self.recorded += gained

    def _take_together(self, step: int, gained: int) -> None:
        """Record several tokens of one step: each of them, except one that continues a run, is a run of its own."""
        if self.runs and step - self.runs[-1] == 1:
            self.runs[-1] = step
            gained -= 1
            self.recorded += 1
        self.runs += (step, step) * gained
        self.recorded += gained


class Timeline:
    """Means over intervals of time, at most BUCKETS of them."""

    NAMES = ("at_work", "batch", "waiting", "used_bytes")

    def __init__(self) -> None:
        self.width = FIRST_WIDTH
        self.sums: list[list[int]] = []  # per bucket: the values of NAMES, times nanoseconds

    def add(self, start: int, end: int, batch: int, waiting: int, size: int) -> None:
        """Record that a replica computes between two times, in nanoseconds.

        batch: sequences of the step. waiting: sequences that wait. size: bytes of pages in use.
        """
        last = (end - 1) // self.width
        while last >= BUCKETS:
            self._halve()
            last = (end - 1) // self.width
        while len(self.sums) <= last:
            self.sums.append([0, 0, 0, 0])
        width = self.width
        for index in range(start // width, last + 1):
            busy = min(end, (index + 1) * width) - max(start, index * width)
            sums = self.sums[index]
            sums[0] += busy
            sums[1] += busy * batch
            sums[2] += busy * waiting
            sums[3] += busy * size

    def columns(self) -> dict[str, list[float]]:
        """Return columns with one value per interval, summed over replicas.

        time_s: the middle of the interval. at_work: share of the time in which steps run. batch, waiting, used_bytes:
        means over the whole interval.
        """
        sums = np.array(self.sums or [[0] * 4], np.float64) / self.width
        times = (np.arange(len(sums)) + 0.5) * self.width / SECOND
        return {"time_s": times.tolist()} | {
            name: column.tolist() for name, column in zip(self.NAMES, sums.T, strict=True)
        }

    def _halve(self) -> None:
        self.width *= 2
        if len(self.sums) % 2:
            self.sums.append([0, 0, 0, 0])
        pairs = zip(self.sums[::2], self.sums[1::2], strict=True)
        self.sums = [[x + y for x, y in zip(a, b, strict=True)] for a, b in pairs]


@dataclass(frozen=True, slots=True)
class Run:
    """A workload that was simulated or measured: its report, and the data for a picture."""

    report: Report
    answered: Answered
    timeline: Timeline


class StepLog:
    """The steps of one replica: the end of each, and sums over all."""

    def __init__(self, timeline: Timeline) -> None:
        self.ends = array("q")
        self.busy = self.batch = self.waiting = self.size = self.peak = self.drafting = 0
        self._timeline = timeline

    def step(self, start: int, end: int, batch: int, waiting: int, size: int) -> None:
        """Record a step. size: bytes of pages in use."""
        self.ends.append(end)
        self._add(start, end, batch, waiting, size)

    def add_drafting(self, duration: int) -> None:
        """Record the time before a step in which drafts were proposed, in nanoseconds; it counts as the step's too."""
        self.drafting += duration

    def calm(self, start: int, ends: Sequence[int], batch: int, waiting: int, sizes: Sequence[tuple[int, int]]) -> None:
        """Record consecutive steps. sizes: (index of a step, bytes in use from it on); the first index is 0."""
        self.ends.extend(ends)
        for (first, size), (stop, _) in zip(sizes, [*sizes[1:], (len(ends), 0)], strict=True):
            if first < stop:
                self._add(ends[first - 1] if first else start, ends[stop - 1], batch, waiting, size)

    def _add(self, start: int, end: int, batch: int, waiting: int, size: int) -> None:
        busy = end - start
        self.busy += busy
        self.batch += batch * busy
        self.waiting += waiting * busy
        self.size += size * busy
        if size > self.peak:
            self.peak = size
        self._timeline.add(start, end, batch, waiting, size)


class Book:
    """Records all replicas and all requests.

    waits_ns: for each request, how long before the engine it reached the server; empty if the engine gets it at once.
    """

    def __init__(self, replicas: int) -> None:
        self.waits_ns: Sequence[int] = ()
        self.timeline = Timeline()
        self.logs = [StepLog(self.timeline) for _ in range(replicas)]
        names = ("index", "replica", "arrival", "prompt", "output", "cached", "preempted")
        self._columns = {name: array("q") for name in names}
        self._runs = array("q")  # first and last step of each run, flattened
        self._run_of = array("q")  # index in the columns of each run's answer

    def close(self, opened: Open) -> None:
        """Record a complete answer."""
        number = len(self._columns["index"])
        request, sequence = opened.request, opened.sequence
        values = (
            opened.index, opened.replica, request.arrival_ns, request.prompt_tokens, request.output_tokens,
            sequence.num_cached, sequence.num_preempted,
        )  # fmt: skip
        for column, value in zip(self._columns.values(), values, strict=True):
            column.append(value)
        self._runs.extend(opened.runs)
        self._run_of.extend([number] * (len(opened.runs) // 2))

    def column(self, name: str) -> Ints:
        """Return a column of all answers in order of arrival.

        name: index, replica, arrival (at the server), prompt, output, cached or preempted.
        """
        found = _ints(self._columns[name])[self._order()]
        if name == "arrival" and len(self.waits_ns):
            found = found - np.array(self.waits_ns, np.int64)[self.column("index")]
        return found

    def answered(self) -> Answered:
        """Return all answers in order of arrival."""
        owners, runs = _ints(self._run_of), _ints(self._runs).reshape(-1, 2)
        replicas = _ints(self._columns["replica"])[owners]
        ends = [_ints(log.ends) for log in self.logs]
        begin, end = self._times(runs[:, 0], replicas, ends), self._times(runs[:, 1], replicas, ends)
        count, order = len(self._columns["index"]), self._order()
        first, last = np.zeros(count, np.int64), np.zeros(count, np.int64)
        first[owners[::-1]], last[owners] = begin[::-1], end  # each answer's first and last token
        gaps, counts = self._gaps(owners, runs, replicas, begin, end, ends)
        sizes = self.column("prompt"), self.column("output")
        return Answered(self.column("arrival"), first[order], last[order], *sizes, gaps, counts)

    def token_times(self) -> list[list[int]]:
        """Return the times of each answer's tokens, in order of arrival."""
        times: list[list[int]] = [[] for _ in self._columns["index"]]
        replicas = self._columns["replica"]
        for owner, first, last in zip(self._run_of, self._runs[::2], self._runs[1::2], strict=True):
            times[owner] += self.logs[replicas[owner]].ends[first : last + 1]
        return [times[number] for number in self._order().tolist()]

    def _order(self) -> Ints:
        return np.argsort(_ints(self._columns["index"]), kind="stable")

    def _times(self, steps: Ints, replicas: Ints, ends: Sequence[Ints]) -> Ints:
        starts = np.cumsum([0, *map(len, ends)])[:-1]
        return np.concatenate(ends)[steps + starts[replicas]] if len(steps) else steps

    def _gaps(
        self, owners: Ints, runs: Ints, replicas: Ints, begin: Ints, end: Ints, ends: Sequence[Ints]
    ) -> tuple[Ints, Ints]:
        """Return the times between tokens and their counts: of steps within runs, and between two runs."""
        gaps, counts = [], []
        for replica, of_steps in enumerate(ends):
            if len(of_steps) > 1:
                mine = runs[replicas == replica]
                changes = np.bincount(mine[:, 0] + 1, minlength=len(of_steps) + 1)
                changes = changes - np.bincount(mine[:, 1] + 1, minlength=len(of_steps) + 1)
                gaps.append(np.diff(of_steps))
                counts.append(np.cumsum(changes)[1 : len(of_steps)])
        same = owners[1:] == owners[:-1]
        gaps.append((begin[1:] - end[:-1])[same])
        counts.append(np.ones(int(same.sum()), np.int64))
        return np.concatenate(gaps), np.concatenate(counts)


def _ints(values: Any) -> Ints:
    return np.frombuffer(values, np.int64) if len(values) else np.zeros(0, np.int64)
