"""A workload against a server: requests at their times, or clients that each wait for their answer.

In the open loop a request goes out when it is due, whatever became of those before it, and its times count from when it
was due: a server that stalls is charged for everybody who had to wait, and so is a client that cannot keep up
(`Measured.lateness_s` says by how much it did not). There is no coordinated omission.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from ridgeline.errors import RequestError
from ridgeline.measure.client import Answer, Client, Server
from ridgeline.measure.replay import prompt_ids
from ridgeline.plan.limits import Slo
from ridgeline.sim.metrics import Answered, Report, Usage, report
from ridgeline.sim.workload import SECOND, Request, Workload


@dataclass(frozen=True, slots=True)
class Measured:
    """The results of a workload. report: figures of answered requests; goodput and attainment count all requests.

    failures: why requests were not answered, and how many. lateness_s: most of the time between when a request was due
    and when it went out. at_once: most requests that were open at one time. answers: one for each request.
    without_usage: answers whose tokens the server did not count.
    """

    report: Report
    failures: Mapping[str, int]
    lateness_s: float
    at_once: int
    answers: Sequence[Answer]

    @property
    def failed(self) -> int:
        return sum(self.failures.values())

    @property
    def without_usage(self) -> int:
        return sum(answer.error is None and answer.counted_by != "usage" for answer in self.answers)


class Loop:
    """Sends a workload to a server.

    Extra: fields for every request. on_done: called with the tokens of each request.
    """

    def __init__(
        self, client: Client, server: Server, *, vocab_size: int, seed: int, extra: Mapping[str, Any],
        on_done: Callable[[int], None] = lambda tokens: None,
    ) -> None:  # fmt: skip
        self._client, self._server, self._extra = client, server, extra
        self._vocab_size, self._seed, self._on_done = vocab_size, seed, on_done
        self._open = self._at_once = 0
        self._answers: list[Answer] = []

    async def warm_up(self, requests: Sequence[Request]) -> None:
        """Send requests one by one, with their own prompts. Raises RequestError if one is not answered."""
        for index, request in enumerate(requests):
            answer = Answer(time.perf_counter_ns(), request.prompt_tokens)
            await self._client.complete(self._body(request, index, self._seed + 1), answer)
            if answer.error is not None:
                raise RequestError(
                    f"the first request, to warm up, failed: {answer.error} (a server that takes no token ids wants "
                    "--backend openai-text or openai-chat)"
                )

    async def run(self, workload: Workload, slo: Slo | None) -> Measured:
        """Run the whole workload. Raises RequestError if no request was answered."""
        bodies = [self._body(request, i, self._seed) for i, request in enumerate(workload.requests)]  # takes a while
        if workload.clients is None:
            await self._by_time(workload.requests, bodies)
        else:
            await self._by_clients(workload, bodies)
        return measured(self._answers, self._at_once, slo)

    def _body(self, request: Request, index: int, seed: int) -> dict[str, Any]:
        ids = prompt_ids(request, index, self._vocab_size, seed)
        return self._client.body(self._server, ids, request.output_tokens, self._extra)

    async def _by_time(self, requests: Sequence[Request], bodies: Sequence[dict[str, Any]]) -> None:
        start = time.perf_counter_ns()
        async with asyncio.TaskGroup() as group:
            for request, made in zip(requests, bodies, strict=True):
                due = start + request.arrival_ns
                while (left := due - time.perf_counter_ns()) > 0:
                    await asyncio.sleep(left / SECOND)
                group.create_task(self._ask(due, request, made))

    async def _by_clients(self, workload: Workload, bodies: Sequence[dict[str, Any]]) -> None:
        queue = iter(zip(workload.requests, bodies, strict=True))

        async def client() -> None:
            for request, made in queue:
                await self._ask(time.perf_counter_ns(), request, made)
                await asyncio.sleep(workload.think_ns / SECOND)

        async with asyncio.TaskGroup() as group:
            for _ in range(workload.clients or 0):
                group.create_task(client())

    async def _ask(self, due: int, request: Request, made: dict[str, Any]) -> None:
        answer = Answer(due, request.prompt_tokens)
        self._answers.append(answer)
        self._open += 1
        self._at_once = max(self._at_once, self._open)
        await self._client.complete(made, answer)
        self._open -= 1
        self._on_done(answer.tokens)


def measured(answers: Sequence[Answer], at_once: int, slo: Slo | None) -> Measured:
    """Return the figures of a run. Raises RequestError if no request was answered."""
    good = sorted((a for a in answers if a.error is None), key=lambda a: a.arrival_ns)
    failures = Counter(a.error for a in answers if a.error is not None)
    if not good:
        worst = failures.most_common(1)
        raise RequestError(f"no request was answered: {worst[0][0]}" if worst else "there was no request")
    gaps = [b - a for answer in good for a, b in pairwise(answer.times_ns)]
    columns = (
        [a.arrival_ns for a in good], [a.times_ns[0] for a in good], [a.times_ns[-1] for a in good],
        [a.prompt_tokens for a in good], [a.tokens for a in good], gaps, [1] * len(gaps),
    )  # fmt: skip
    found = report(Answered(*(np.array(column, np.int64) for column in columns)), Usage(), slo)
    if found.attainment is not None:  # requests without an answer missed the SLO
        found = replace(found, attainment=found.attainment * len(good) / len(answers))
    late = max(a.sent_ns - a.arrival_ns for a in answers) / SECOND
    return Measured(found, dict(failures.most_common()), late, at_once, answers)
