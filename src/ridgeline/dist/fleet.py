"""Several engines with the same model behind one server: each prompt goes to the replica that answers it first.

A prompt goes where most of it is computed already, unless other prompts wait there (`sched/routing.py`). If an engine
ends, its prompts go on elsewhere: answers depend on the request alone, so clients see a pause and no other change.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from itertools import count
from random import Random
from typing import Any

from ridgeline.dist.prefixes import PrefixIndex, block_keys
from ridgeline.dist.resume import Sent
from ridgeline.dist.totals import total
from ridgeline.runtime.generator import GenerationRequest
from ridgeline.runtime.vectors import Floats, Reading, Text
from ridgeline.sched.routing import Route, prefix_aware
from ridgeline.serve.engine.client import Answers, EngineClient, EngineDown, Health, State
from ridgeline.serve.engine.messages import Ready, Report
from ridgeline.spec.request import OutputChunk

MAX_ENGINES = 3  # that may end during one request: a request that ends engines must not end all of them
PAUSE_SECONDS = 60.0  # that a request waits for any engine after its own ended
POLL_SECONDS = 0.05

log = logging.getLogger(__name__)


class Replica:
    """An engine as the router sees it.

    pending_tokens: tokens to compute of prompts without a token yet. live: number of prompts that it answers. routed:
    number of prompts that it got so far. moved: number of those that left when its engine ended. prompt_tokens,
    hit_tokens: tokens of finished prompts, and how many of them it found in its prefix cache.
    """

    def __init__(self, number: int, client: EngineClient) -> None:
        self.number, self.client = number, client
        self.pending_tokens = self.live = self.routed = self.moved = self.prompt_tokens = self.hit_tokens = 0
        self.restarts = 0  # of the engine whose blocks the index has

    def cached_tokens(self, request: Asked) -> int:
        """Return how many tokens of a prompt it has computed, as far as the index knows."""
        return request.depths.get(self.number, 0) * request.block

    def figures(self) -> dict[str, Any]:
        """Return its figures for the live page."""
        return {
            "replica": self.number, "state": self.client.health, "restarts": self.client.restarts,
            "running": self.live, "routed": self.routed, "moved": self.moved, "prompt_tokens": self.prompt_tokens,
            "hit_tokens": self.hit_tokens,
        }  # fmt: skip


class Asked:
    """A prompt as the router sees it. depths: blocks that replicas hold of it, by the replica's number."""

    def __init__(self, prompt: Sequence[int], salt: str, index: PrefixIndex, block: int) -> None:
        self.block, self.prompt_tokens = block, len(prompt)
        self.keys = block_keys(prompt, block, salt)
        self.depths = index.depths(self.keys)


class _Run:
    """One prompt on its way: the replica that answers it, and what its client has received."""

    def __init__(self, fleet: Fleet, number: int, request: GenerationRequest, arrived: float, stream: bool) -> None:
        self._fleet, self.number, self.request, self._arrived, self._stream = fleet, number, request, arrived, stream
        self.sent, self.ended = Sent(), 0  # engines that ended while they answered it
        self.replica: Replica | None = None
        self._inner: Answers | None = None
        self._pending = 0  # its share of the replica's pending_tokens

    def begin(self, replica: Replica, asked: Asked) -> None:
        """Send the prompt to a replica. Raises EngineDown."""
        self._inner = replica.client.submit([self.request], self._arrived, stream=self._stream, on_done=lambda: None)
        self._inner.listen(self._take)
        self.replica, self._pending = replica, asked.prompt_tokens - replica.cached_tokens(asked)
        replica.live, replica.routed = replica.live + 1, replica.routed + 1
        replica.pending_tokens += self._pending

    def leave(self, *, abort: bool = False) -> None:
        """Take it from its replica."""
        replica, self.replica = self.replica, None
        if replica is not None:
            replica.live -= 1
            replica.pending_tokens -= self._pending
            self._pending = 0
        inner, self._inner = self._inner, None
        if abort and inner is not None:
            inner.close()

    def _take(self) -> None:
        """Pass on what arrived."""
        while (inner := self._inner) is not None:
            try:
                items = inner.take()
            except EngineDown as e:
                if self.replica is not None:
                    self.replica.moved += 1
                self.leave()
                self._fleet.lost(self, e)
                return
            except Exception as e:  # the engine refused it, or was too busy: another one would do the same
                self.leave()
                self._fleet.failed(self, e)
                return
            if not items:
                return
            for _, chunk in items:
                self._pass_on(chunk, inner.committed)

    def _pass_on(self, chunk: OutputChunk, committed: float) -> None:
        if self._pending and self.replica is not None:
            self.replica.pending_tokens -= self._pending
            self._pending = 0
        if chunk.output is not None:
            replica = self.replica
            self.leave()
            if replica is not None:
                self._fleet.finished(self, replica, chunk)
        if (rest := self.sent.rest(chunk)) is not None:
            self._fleet.deliver(self, rest, committed)


class Fleet:
    """Has the interface of one engine (`serve.engine.handle.EngineHandle`). All methods must run in one event loop."""

    def __init__(self, clients: Sequence[EngineClient], route: Route = prefix_aware) -> None:
        self._replicas = [Replica(i, client) for i, client in enumerate(clients)]
        self._route, self._chance = route, Random(0)
        self._ids, self._turns = count(), count()
        self._runs: dict[int, tuple[_Run, Answers]] = {}
        self._moving: set[asyncio.Task[None]] = set()
        self._index, self._block = PrefixIndex(), 1
        self._closed = False

    # ---- the interface of an engine ---------------------------------------------------------------------------

    async def start(self) -> Ready:
        """Load the model in all engines. They get the settings that the first one chose. Raises StartFailed."""
        first, *others = (r.client for r in self._replicas)
        ready = await first.start()
        self._block = ready.config.block_size
        for client in others:
            client.pin(ready.config)
        await asyncio.gather(*(client.start() for client in others))
        return ready

    @property
    def health(self) -> Health:
        """Return "ready" while any engine is, otherwise the state of the first one."""
        return "ready" if self.up else self._replicas[0].client.health

    @property
    def state(self) -> State:
        """Return "ready" while any engine is, otherwise the state of the first one."""
        states = [r.client.state for r in self._replicas]
        return "ready" if "ready" in states else states[0]

    @property
    def up(self) -> bool:
        """Return whether any engine can answer."""
        return any(r.client.up for r in self._replicas)

    @property
    def restarts(self) -> int:
        """Return the number of restarts of all engines."""
        return sum(r.client.restarts for r in self._replicas)

    @property
    def silent_s(self) -> float:
        """Return the seconds since the last message of any engine."""
        return min(r.client.silent_s for r in self._replicas)

    @property
    def engines(self) -> int:
        """Return the number of engines."""
        return len(self._replicas)

    def replicas(self) -> Sequence[dict[str, Any]]:
        """Return figures of each replica."""
        return [r.figures() for r in self._replicas]

    def submit(
        self, requests: Sequence[GenerationRequest], arrived: float, *, stream: bool, on_done: Callable[[], None]
    ) -> Answers:
        """Send each prompt to a replica, as `EngineClient.submit` does for one engine. Raises EngineDown."""
        if self._closed or not self.up:
            raise EngineDown(f"no engine is ready (the first one is {self.health}); try again")
        runs = [_Run(self, next(self._ids), request, arrived, stream) for request in requests]
        answers = Answers([run.number for run in runs], self._end, on_done)
        for run in runs:
            self._runs[run.number] = run, answers
        for run in runs:
            if not self._begin(run):
                self._later(run, EngineDown("no engine is ready; try again"))
        return answers

    async def embed(self, texts: Sequence[Text], reading: Reading) -> Floats:
        """Return a row of numbers for each text, from the engine with the fewest requests.

        Raises RequestError, EngineDown.
        """
        while True:
            ready = [r for r in self._replicas if r.client.up]
            if not ready:
                raise EngineDown("no engine is ready; try again")
            chosen = min(ready, key=lambda r: r.live)
            chosen.live += 1
            try:
                return await chosen.client.embed(texts, reading)
            except EngineDown:
                if len(ready) == 1:
                    raise
            finally:
                chosen.live -= 1

    async def adapt(self, name: str, source: str | None) -> None:
        """Load an adapter in all engines, or drop it if there is no source. If one of them refuses, none keeps it.

        Raises RequestError, EngineDown.
        """
        if not all(r.client.up for r in self._replicas):
            raise EngineDown("an engine is not ready; try again")
        found = await asyncio.gather(*(r.client.adapt(name, source) for r in self._replicas), return_exceptions=True)
        failed = next((one for one in found if isinstance(one, BaseException)), None)
        if failed is None:
            return
        if source is not None:
            done = [r.client for r, one in zip(self._replicas, found, strict=True) if one is None]
            await asyncio.gather(*(client.adapt(name, None) for client in done), return_exceptions=True)
        raise failed

    async def report(self) -> Report:
        """Return the sum of the engines' counters, of those that answer. Raises EngineDown."""
        asked = (r.client.report() for r in self._replicas if r.client.up)
        found = await asyncio.gather(*asked, return_exceptions=True)
        reports = [one for one in found if isinstance(one, Report)]
        if not reports:
            raise EngineDown("no engine is ready; try again")
        return total(reports)

    def end_all(self, why: str) -> None:
        """End every open request with the error `why`."""
        for run, _ in list(self._runs.values()):
            self.failed(run, EngineDown(why))

    async def sleep(self) -> None:
        """End all engines, which frees their memory, until `wake`. Every open request ends. Raises EngineDown."""
        if not all(r.client.state == "ready" for r in self._replicas):
            raise EngineDown("an engine is not ready; try again")
        self.end_all("the engines were sent to sleep")
        await asyncio.gather(*(r.client.sleep() for r in self._replicas))

    async def wake(self) -> None:
        """Start all engines again. Raises EngineDown, StartFailed."""
        await asyncio.gather(*(r.client.wake() for r in self._replicas if r.client.state == "sleeping"))

    async def close(self) -> None:
        """End all engines and every open request. May be called again."""
        self._closed = True
        self.end_all("the server is stopping")
        for task in self._moving:
            task.cancel()
        await asyncio.gather(*(r.client.close() for r in self._replicas))

    # ---- prompts ------------------------------------------------------------------------------------------------

    def _begin(self, run: _Run) -> bool:
        """Send a prompt to the best replica. Return False if no engine is ready."""
        ready = [r for r in self._replicas if r.client.up]
        if not ready:
            return False
        for replica in ready:
            if replica.restarts != replica.client.restarts:  # a new process has computed nothing
                self._index.forget(replica.number)
                replica.restarts = replica.client.restarts
        asked = Asked(run.request.prompt_token_ids, run.request.cache_salt, self._index, self._block)
        replica = ready[self._route(asked, ready, next(self._turns), self._chance)]
        try:
            run.begin(replica, asked)
        except EngineDown:
            return False
        self._index.add(asked.keys, replica.number)
        return True

    def deliver(self, run: _Run, chunk: OutputChunk, committed: float) -> None:
        """Give a chunk to the client."""
        if (found := self._runs.get(run.number)) is None:
            return
        answers = found[1]
        if answers.put(run.number, chunk, committed):
            self._runs.pop(run.number, None)
        answers.notify()

    def finished(self, run: _Run, replica: Replica, chunk: OutputChunk) -> None:
        """Count what the engine found in its prefix cache, and add the whole text to the index."""
        output, prompt = chunk.output, run.request.prompt_token_ids
        assert output is not None
        replica.prompt_tokens += len(prompt)
        replica.hit_tokens += output.num_cached_tokens
        if len(output.outputs) == 1:  # the next turn of a conversation continues its answer
            whole = [*prompt, *output.outputs[0].token_ids]
            self._index.add(block_keys(whole, self._block, run.request.cache_salt), replica.number)

    def lost(self, run: _Run, error: EngineDown) -> None:
        """Send a prompt to another replica, because its engine ended or a step of it failed."""
        run.ended += 1
        if self._closed or run.ended >= MAX_ENGINES or run.number not in self._runs:
            self.failed(run, error)
            return
        run.sent.again()
        if not self._begin(run):
            self._later(run, error)

    def failed(self, run: _Run, error: Exception) -> None:
        """End the request of a prompt with an error."""
        if (found := self._runs.pop(run.number, None)) is not None:
            run.leave(abort=True)
            found[1].fail(error)

    def _later(self, run: _Run, error: EngineDown) -> None:
        """Begin once an engine is ready, or fail after PAUSE_SECONDS."""

        async def wait() -> None:
            end = time.monotonic() + PAUSE_SECONDS
            while run.number in self._runs and not self._begin(run):
                if time.monotonic() > end:
                    self.failed(run, error)
                    return
                await asyncio.sleep(POLL_SECONDS)

        task = asyncio.create_task(wait())
        self._moving.add(task)
        task.add_done_callback(self._moving.discard)

    def _end(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            if (found := self._runs.pop(number, None)) is not None:
                found[0].leave(abort=True)
