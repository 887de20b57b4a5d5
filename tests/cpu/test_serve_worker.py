"""The engine's loop by itself: a session and a model that fail as they are told, and the messages that come of it."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from ridgeline.runtime.generator import GenerationRequest
from ridgeline.sched.stats import StepShape
from ridgeline.serve.machine import StepCost
from ridgeline.serve.messages import Abort, Embed, Embedded, Inbox, Lost, Submit, frame
from ridgeline.serve.worker import Worker
from ridgeline.spec.request import OutputChunk, SamplingParams

REQUEST = GenerationRequest(None, (1, 2), SamplingParams(), ())


class FakeSession:
    """Steps do what `steps` says, one after the other: give every open request a token, compute nothing, or fail."""

    def __init__(self) -> None:
        self.sinks: dict[int, Any] = {}
        self.steps: list[str] = []
        self.shape: StepShape = ()
        self.checks = 0

    def __len__(self) -> int:
        return len(self.sinks)

    def add(self, request: GenerationRequest, sink: Any, arrived: float) -> int:
        self.sinks[len(self.sinks)] = sink
        return len(self.sinks) - 1

    def abort(self, request_id: int) -> None:
        self.sinks.pop(request_id, None)

    def step(self) -> None:
        kind = self.steps.pop(0)
        self.shape = ((1, 9, 1),) if kind == "token" else ()
        if kind == "fails":
            self.sinks.clear()
            raise RuntimeError("the device is gone")
        for sink in list(self.sinks.values()) if kind == "token" else ():
            sink(OutputChunk(0, "a", (1,), (), None, None, None, None))

    def last_step(self) -> StepShape:
        return self.shape

    def stats(self) -> None:
        return None

    def check(self) -> None:
        self.checks += 1


class Bench:
    """A worker, and the other end of its pipe."""

    def __init__(self) -> None:
        self.ours, self._theirs = socket.socketpair()
        self.session, memory = FakeSession(), SimpleNamespace(on_host=False)
        loaded = SimpleNamespace(table=SimpleNamespace(memory=memory))
        llm: Any = SimpleNamespace(session=self.session, grammars=None, loaded=loaded)
        ledger: Any = SimpleNamespace(cost=lambda shape: StepCost(10.0, 1.0, 1.0, 1.0))
        self.worker = Worker(llm, self._theirs, Inbox(self._theirs), ledger)
        self._inbox = Inbox(self.ours)

    def close(self) -> None:
        self.ours.close()
        self._theirs.close()

    def send(self, *messages: object) -> None:
        for message in messages:
            self.ours.sendall(frame(message))

    def turn(self, times: int = 1) -> list[Any]:
        """What the worker says in so many turns."""
        for _ in range(times):
            self.worker._turn()
        return self._inbox.read(0.0)


@pytest.fixture
def bench() -> Iterator[Bench]:
    found = Bench()
    yield found
    found.close()


def test_embeddings_take_turns_and_fail_alone(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[int] = []

    def embed(loaded: Any, prompt: list[int], pooling: str) -> list[float]:
        done.append(prompt[0])
        if prompt[0] == 13:
            raise MemoryError
        return [float(prompt[0])]

    monkeypatch.setattr("ridgeline.serve.embed.embed", embed)
    bench.session.steps = ["token"] * 9
    bench.send(Submit(0, REQUEST, 0.0, False), Embed(1, [[1], [2]], "mean"), Embed(2, [[13], [3]], "mean"))
    bench.send(Embed(3, [[4]], "last"))
    assert bench.turn() == [] and done == [1] and len(bench.session.steps) == 8  # a step and a prompt in each turn
    assert bench.turn() == [Embedded(1, [[1.0], [2.0]])]
    (lost,) = bench.turn()
    assert isinstance(lost, Lost) and lost.ids == [2] and "MemoryError" in lost.message
    assert bench.turn() == [Embedded(3, [[4.0]])] and done == [1, 2, 13, 4]


def test_an_embedding_that_nobody_waits_for_ends(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ridgeline.serve.embed.embed", lambda loaded, prompt, pooling: [float(prompt[0])])
    bench.send(Embed(1, [[1], [2], [3]], "mean"), Embed(2, [[4], [5]], "mean"), Embed(3, [[6]], "mean"))
    assert bench.turn() == []
    bench.send(Abort(1), Abort(3), Abort(7))
    assert bench.turn(2) == [Embedded(2, [[4.0], [5.0]])]
    assert not len(bench.worker._embedder)
