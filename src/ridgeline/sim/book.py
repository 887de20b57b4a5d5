"""What is written down while a simulation runs, and what it gives at the end.

Times are whole nanoseconds and all sums are of whole numbers: to take many steps at once gives the same to the digit.
A token's time is the end of its step, so an answer is a few runs of steps, [first, last], in each of which it got one.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ridgeline.sched.sequence import Sequence as Sched
from ridgeline.sim.metrics import Answered, Ints, Report
from ridgeline.sim.workload import Request

BUCKETS = 512  # at most
FIRST_WIDTH = 1 << 20  # nanoseconds


@dataclass(slots=True)
class Open:
    """A request on a replica. index: in the workload. runs: first and last step of each run, one after the other."""

    index: int
    request: Request
    sequence: Sched
    replica: int
    pending: int  # tokens of its prompt that are to be computed, until its first token
    runs: list[int] = field(default_factory=list)
    recorded: int = 0  # tokens

    def take(self, step: int) -> None:
        """It got a token in `step`, and in every step between, as far as its sequence has grown by more."""
        gained = len(self.sequence.tokens) - self.sequence.num_prompt - self.recorded
        runs = self.runs
        if not runs:
            self.runs = [step, step]
        elif step - runs[-1] == gained:
            runs[-1] = step
        else:
            runs[-1] += gained - 1
            runs += (step, step)
        self.recorded += gained


class Timeline:
    """Means over stretches of time, as fine as BUCKETS allow: a step counts where it ends."""

    NAMES = ("busy", "batch", "waiting", "bytes")

    def __init__(self) -> None:
        self.width = FIRST_WIDTH
        self.sums: list[list[int]] = []  # per bucket, as NAMES says: times nanoseconds

    def add(self, end: int, busy: int, batch: int, waiting: int, size: int) -> None:
        """busy: nanoseconds; the others: sums of a number times nanoseconds."""
        place = end // self.width
        while place >= BUCKETS:
            self._halve()
            place = end // self.width
        while len(self.sums) <= place:
            self.sums.append([0, 0, 0, 0])
        sums = self.sums[place]
        sums[0] += busy
        sums[1] += batch
        sums[2] += waiting
        sums[3] += size

    def _halve(self) -> None:
        self.width *= 2
        if len(self.sums) % 2:
            self.sums.append([0, 0, 0, 0])
        pairs = zip(self.sums[::2], self.sums[1::2], strict=True)
        self.sums = [[x + y for x, y in zip(a, b, strict=True)] for a, b in pairs]


@dataclass(frozen=True, slots=True)
class Run:
    """A workload that was run, simulated or measured: the columns, and what they and a picture are made of."""

    report: Report
    answered: Answered
    timeline: Timeline


class StepLog:
    """The steps of one replica: when each ended, and sums over them."""

    def __init__(self, timeline: Timeline) -> None:
        self.ends = array("q")
        self.busy = self.batch = self.waiting = self.size = self.peak = 0
        self._timeline = timeline

    def step(self, start: int, end: int, batch: int, waiting: int, size: int) -> None:
        """One step, in which pages of `size` bytes are in use."""
        self.ends.append(end)
        self._add(end, end - start, batch, waiting, (end - start) * size)
        if size > self.peak:
            self.peak = size

    def calm(self, start: int, ends: Sequence[int], batch: int, waiting: int, sizes: Sequence[tuple[int, int]]) -> None:
        """Steps that follow each other; sizes: (place among them, bytes in use from there on), the first at 0."""
        self.ends.extend(ends)
        width = self._timeline.width
        for (first, size), (stop, _) in zip(sizes, [*sizes[1:], (len(ends), 0)], strict=True):
            self.peak = max(self.peak, size)
            together = first < stop and ends[first] // width == ends[stop - 1] // width
            for a, b in [(first, stop)] if together else [(i, i + 1) for i in range(first, stop)]:
                busy = ends[b - 1] - (ends[a - 1] if a else start)
                self._add(ends[b - 1], busy, batch, waiting, busy * size)

    def _add(self, end: int, busy: int, batch: int, waiting: int, byte_ns: int) -> None:
        self.busy += busy
        self.batch += batch * busy
        self.waiting += waiting * busy
        self.size += byte_ns
        self._timeline.add(end, busy, batch * busy, waiting * busy, byte_ns)


class Book:
    """Of all replicas and all requests."""

    def __init__(self, replicas: int) -> None:
        self.timeline = Timeline()
        self.logs = [StepLog(self.timeline) for _ in range(replicas)]
        names = ("index", "replica", "arrival", "prompt", "output", "cached", "preempted")
        self._columns = {name: array("q") for name in names}
        self._runs = array("q")  # first and last step of each, one after the other
        self._run_of = array("q")  # which answer, as it stands in the columns

    def close(self, opened: Open) -> None:
        """An answer is complete."""
        place = len(self._columns["index"])
        request, sequence = opened.request, opened.sequence
        values = (
            opened.index, opened.replica, request.arrival_ns, request.prompt_tokens, request.output_tokens,
            sequence.num_cached, sequence.num_preempted,
        )  # fmt: skip
        for column, value in zip(self._columns.values(), values, strict=True):
            column.append(value)
        self._runs.extend(opened.runs)
        self._run_of.extend([place] * (len(opened.runs) // 2))

    def column(self, name: str) -> Ints:
        """Of all answers, in order of arrival: index, replica, arrival, prompt, output, cached, preempted."""
        return _ints(self._columns[name])[self._order()]

    def answered(self) -> Answered:
        """Of all answers, in order of arrival."""
        owners, runs = _ints(self._run_of), _ints(self._runs).reshape(-1, 2)
        replicas = _ints(self._columns["replica"])[owners]
        ends = [_ints(log.ends) for log in self.logs]
        begin, end = self._times(runs[:, 0], replicas, ends), self._times(runs[:, 1], replicas, ends)
        count, order = len(self._columns["index"]), self._order()
        first, last = np.zeros(count, np.int64), np.zeros(count, np.int64)
        first[owners[::-1]], last[owners] = begin[::-1], end  # the first run's, the last one's
        gaps, counts = self._gaps(owners, runs, replicas, begin, end, ends)
        sizes = self.column("prompt"), self.column("output")
        return Answered(self.column("arrival"), first[order], last[order], *sizes, gaps, counts)

    def token_times(self) -> list[list[int]]:
        """When each answer's tokens came, in order of arrival; as many numbers as tokens."""
        times: list[list[int]] = [[] for _ in self._columns["index"]]
        replicas = self._columns["replica"]
        for owner, first, last in zip(self._run_of, self._runs[::2], self._runs[1::2], strict=True):
            times[owner] += self.logs[replicas[owner]].ends[first : last + 1]
        return [times[place] for place in self._order().tolist()]

    def _order(self) -> Ints:
        return np.argsort(_ints(self._columns["index"]), kind="stable")

    def _times(self, steps: Ints, replicas: Ints, ends: Sequence[Ints]) -> Ints:
        starts = np.cumsum([0, *map(len, ends)])[:-1]
        return np.concatenate(ends)[steps + starts[replicas]] if len(steps) else steps

    def _gaps(
        self, owners: Ints, runs: Ints, replicas: Ints, begin: Ints, end: Ints, ends: Sequence[Ints]
    ) -> tuple[Ints, Ints]:
        """Between tokens, and how often: within runs, the time of each step that is not the first; between two runs."""
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
