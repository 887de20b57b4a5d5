"""A workload through the engine, on the real clock: the same columns as a simulation of it (sim/metrics.py).

Requests come at their times whatever the engine does (or, with clients, one after each answer); tokens are made up from
the blocks' numbers, so that equal blocks are equal tokens; answers are greedy and go on to their full length.
"""

from __future__ import annotations

import heapq
import time
from dataclasses import dataclass, field
from itertools import islice

import numpy as np

from ridgeline.errors import RequestError
from ridgeline.llm import LLM
from ridgeline.sched.stats import Stats
from ridgeline.sim import Slo
from ridgeline.sim.book import Run, Timeline
from ridgeline.sim.metrics import Answered, DraftsUsed, Usage, report
from ridgeline.sim.workload import SECOND, Request, Workload
from ridgeline.spec.request import OutputChunk, SamplingParams


@dataclass(slots=True)
class _Answer:
    arrival_ns: int
    request: Request
    times: list[int] = field(default_factory=list)  # time of each token


def replay(llm: LLM, workload: Workload, *, slo: Slo | None = None, seed: int = 0) -> Run:
    """Run a workload in real time. A token's time is the end of the step that gave it.

    Raises RequestError where nothing is kept between tokens, or no request fits.
    """
    return _Replay(llm, workload, seed).run(slo)


def prompt_ids(request: Request, index: int, vocab_size: int, seed: int) -> list[int]:
    """Return random tokens: those of a block depend on its number alone, those past the blocks on the request."""
    size, left = request.block_tokens, request.prompt_tokens
    ids: list[int] = []
    for block in request.blocks:
        ids += np.random.default_rng((seed, 0, block)).integers(0, vocab_size, min(size, left)).tolist()
        left = request.prompt_tokens - len(ids)
    ids += np.random.default_rng((seed, 1, index)).integers(0, vocab_size, left).tolist()
    return ids


class _Replay:
    def __init__(self, llm: LLM, workload: Workload, seed: int) -> None:
        if llm.config is None:
            raise RequestError("a replay needs pages: leave --cache on")
        self._llm, self._config, self._seed = llm, llm.config, seed
        self._think = workload.think_ns
        self._rest = enumerate(workload.requests)
        self._closed = workload.clients is not None
        first = islice(self._rest, workload.clients)
        self._due = [(0 if self._closed else r.arrival_ns, i, r) for i, r in first]
        heapq.heapify(self._due)
        self._answers: list[_Answer] = []
        self._over = self._refused = 0
        self._timeline = Timeline()
        self._usage = dict.fromkeys(("steps", "busy_ns", "batch_ns", "waiting_ns", "byte_ns", "peak_bytes"), 0)

    def run(self, slo: Slo | None) -> Run:
        session, before = self._llm.session, self._stats()
        self._start = time.perf_counter_ns()
        while self._due or len(session):
            now = self._now()
            if not len(session) and self._due and self._due[0][0] > now:
                time.sleep((self._due[0][0] - now) / SECOND)
                continue
            while self._due and self._due[0][0] <= now:
                self._add(*heapq.heappop(self._due))
            if len(session):
                self._step()
        answered = [a for a in self._answers if a.times]
        if not answered and self._refused:
            raise RequestError("no request fits; raise --max-model-len, or cut them with --truncate")
        columns = _columns(answered)
        return Run(report(columns, self._used(before), slo), columns, self._timeline)

    def _now(self) -> int:
        return time.perf_counter_ns() - self._start

    def _stats(self) -> Stats:
        found = self._llm.stats()
        assert found is not None
        return found

    def _add(self, arrival: int, index: int, request: Request) -> None:
        ids = prompt_ids(request, index, self._llm.loaded.spec.vocab_size, self._seed)
        params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=request.output_tokens)
        answer = _Answer(arrival, request)

        def sink(chunk: OutputChunk) -> None:
            now = self._now()
            answer.times += [now] * len(chunk.token_ids)
            if chunk.output is not None:
                self._over += 1
                self._next(now)

        try:
            made = self._llm.frontend.request({"prompt_token_ids": ids}, params, index, 0)
            self._llm.session.add(made, sink)
        except RequestError:
            self._refused += 1
            self._next(arrival)
        else:
            self._answers.append(answer)

    def _next(self, now: int) -> None:
        """Note that a client has its answer, and will come with the next request."""
        if self._closed:
            for index, request in islice(self._rest, 1):
                heapq.heappush(self._due, (now + self._think, index, request))

    def _step(self) -> None:
        """Run a step, and note the engine's state after it; requests that ended in the step count as present."""
        self._over, start = 0, self._now()
        self._llm.session.step()
        busy, stats, usage = self._now() - start, self._stats(), self._usage
        pairs = zip(stats.groups, self._config.groups, strict=True)
        used = sum(group.used_pages * g.page_bytes for group, g in pairs)
        usage["steps"] += 1
        usage["busy_ns"] += busy
        usage["batch_ns"] += busy * (stats.running + self._over)
        usage["waiting_ns"] += busy * stats.waiting
        usage["byte_ns"] += busy * used
        usage["peak_bytes"] = max(usage["peak_bytes"], used)
        batch = stats.running + self._over
        self._timeline.add(start, start + busy, batch, stats.waiting, used)

    def _used(self, before: Stats) -> Usage:
        after = self._stats()
        return Usage(
            **self._usage,
            state_bytes=self._config.state_bytes,
            queried_tokens=after.queried_tokens - before.queried_tokens,
            hit_tokens=after.hit_tokens - before.hit_tokens,
            preemptions=sum(
                getattr(after, name) - getattr(before, name) for name in ("preempted_recompute", "preempted_swap")
            ),
            refused=self._refused,
            drafts=DraftsUsed.of([after.drafts.plus(before.drafts, -1)]),
        )


def _columns(answers: list[_Answer]) -> Answered:
    gaps = [b - a for answer in answers for a, b in zip(answer.times, islice(answer.times, 1, None), strict=False)]
    columns = (
        [a.arrival_ns for a in answers], [a.times[0] for a in answers], [a.times[-1] for a in answers],
        [a.request.prompt_tokens for a in answers], [len(a.times) for a in answers], gaps, [1] * len(gaps),
    )  # fmt: skip
    return Answered(*(np.array(column, np.int64) for column in columns))
