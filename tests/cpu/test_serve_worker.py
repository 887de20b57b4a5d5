"""The loop of the engine process, with a fake session and model that fail on demand."""

from __future__ import annotations

import os
import resource
import socket
import threading
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ridgeline.errors import HelpersBusy, RequestError
from ridgeline.runtime.generator import GenerationRequest
from ridgeline.runtime.vectors import Reading, Text
from ridgeline.sched.stats import StepShape
from ridgeline.serve.engine.channel import connect
from ridgeline.serve.engine.compiler import MAX_NEW, THREADS, Compiler
from ridgeline.serve.engine.embed import Embedder
from ridgeline.serve.engine.machine import StepEstimate
from ridgeline.serve.engine.messages import Abort, Ask, Embed, Embedded, Inbox, Lost, Refused, Submit, frame
from ridgeline.serve.engine.outgoing import Outgoing
from ridgeline.serve.engine.pulse import Pulse
from ridgeline.serve.engine.worker import Worker
from ridgeline.spec.request import OutputChunk, SamplingParams
from ridgeline.spec.structure import StructuredOutputs

REQUEST = GenerationRequest((1, 2), SamplingParams(), ())


class FakeSession:
    """A fake session. Its steps do what `steps` says: give every open request a token, compute nothing, or fail."""

    def __init__(self) -> None:
        self.sinks: dict[int, Any] = {}
        self.steps: list[str] = []
        self.shape: StepShape = ()
        self.checks, self.sound = 0, True

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
        assert self.sound


class Bench:
    """A worker and the other end of its pipe."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self.session, memory = FakeSession(), SimpleNamespace(on_host=False)
        loaded = SimpleNamespace(table=SimpleNamespace(memory=memory))
        embeddings = SimpleNamespace(reader=None)
        llm: Any = SimpleNamespace(
            session=self.session, grammars=None, loaded=loaded, embeddings=embeddings, batch_tokens=100
        )
        ledger: Any = SimpleNamespace(cost=lambda shape: StepEstimate(10.0, 1.0, 1.0, 1.0, 1.0))
        self._inbox, self._inner = Inbox(ours), Inbox(theirs)
        outgoing = Outgoing(self._inner.send)
        self.worker = Worker(llm, self._inner, ledger, Pulse(lambda message: None), outgoing)

    def close(self) -> None:
        self._inbox.close()
        self._inner.close()

    def send(self, *messages: object) -> None:
        for message in messages:
            self._inbox.sock.sendall(frame(message))

    def said(self) -> list[Any]:
        """Return the messages since the last call."""
        return self._inbox.read(0.0)

    def turn(self, times: int = 1) -> list[Any]:
        """Run a number of iterations of the worker's loop; return its messages."""
        for _ in range(times):
            self.worker._turn()
        return self.said()


@pytest.fixture
def bench() -> Iterator[Bench]:
    found = Bench()
    yield found
    found.close()


class FakeReader:
    """Returns the first id of each text; 13 fails, and 14 is an input from which no vector follows."""

    def __init__(self) -> None:
        self.passes: list[list[int]] = []

    def read(self, texts: Sequence[Text], reading: Reading) -> np.ndarray:
        self.passes.append([text.ids[0] for text in texts])
        if 13 in self.passes[-1]:
            raise MemoryError
        if 14 in self.passes[-1]:
            raise RequestError("no vector")
        return np.array([[float(text.ids[0])] for text in texts])


def embed(number: int, *firsts: int, tokens: int = 40, pool: Any = "mean") -> Embed:
    """Return a request for texts of so many tokens."""
    return Embed(number, [Text([first] * tokens) for first in firsts], Reading(pool=pool))


@pytest.fixture
def reader(bench: Bench) -> FakeReader:
    found = FakeReader()
    bench.worker._embedder = Embedder(found, 100, bench.worker._meters)  # two texts of 40 tokens fit into a pass
    return found


def rows_of(messages: list[Any]) -> dict[int, list[float]]:
    return {message.id: message.rows[:, 0].tolist() for message in messages if isinstance(message, Embedded)}


def test_embeddings_alternate_with_steps_and_take_turns(bench: Bench, reader: FakeReader) -> None:
    bench.session.steps = ["token"] * 9
    bench.send(Submit(0, REQUEST, 0.0, False), embed(1, 1, 2, 3, 4, 5), embed(2, 6), embed(3, 7, pool="last"))
    assert bench.turn() == [] and len(bench.session.steps) == 8  # a step and a pass in each iteration
    assert rows_of(bench.turn()) == {2: [6.0]}
    assert rows_of(bench.turn()) == {3: [7.0]}
    assert rows_of(bench.turn()) == {1: [1.0, 2.0, 3.0, 4.0, 5.0]}
    assert reader.passes == [[1, 2], [6, 3], [7], [4, 5]]
    assert (bench.worker._meters.embedded_texts, bench.worker._meters.embedded_tokens) == (7, 280)


def test_an_embedding_fails_alone(bench: Bench, reader: FakeReader) -> None:
    bench.send(embed(1, 13), embed(2, 2), embed(3, 14), embed(4, 3, tokens=1000))
    messages = bench.turn(3)
    assert rows_of(messages) == {2: [2.0], 4: [3.0]}
    (lost,) = (message for message in messages if isinstance(message, Lost))
    assert lost.ids == [1] and "MemoryError" in lost.message
    assert Refused(3, "no vector") in messages and not len(bench.worker._embedder)


def test_an_aborted_embedding_ends(bench: Bench, reader: FakeReader) -> None:
    bench.send(embed(1, 1, 2, 3), embed(2, 4, 5), embed(3, 6))
    assert bench.turn() == []
    bench.send(Abort(1), Abort(3), Abort(7))
    assert rows_of(bench.turn()) == {2: [4.0, 5.0]}
    assert not len(bench.worker._embedder)


def test_three_failed_steps_end_the_process(bench: Bench) -> None:
    """A token between failed steps resets the count."""
    kinds = ["fails", "fails", "token", "fails", "nothing", "fails"]
    for number, kind in enumerate(kinds):
        bench.session.steps = [kind]
        bench.send(Submit(number, REQUEST, 0.0, False))
        lost = [message for message in bench.turn() if isinstance(message, Lost)]
        assert len(lost) == (kind == "fails"), number
    bench.session.steps = ["fails"]
    bench.send(Submit(9, REQUEST, 0.0, False))
    with pytest.raises(SystemExit) as ended:
        bench.turn()
    assert ended.value.code == 1 and isinstance(bench.said()[-1], Lost)


def test_only_steps_that_computed_are_counted(bench: Bench) -> None:
    bench.session.steps = ["token", "nothing", "token", "nothing"]
    bench.send(Submit(0, REQUEST, 0.0, False))
    bench.turn(4)
    meters = bench.worker._meters
    assert (meters.steps, meters.step_bytes) == (4, 20.0)


@pytest.mark.parametrize("sound", [True, False])
def test_bookkeeping_is_checked_despite_frequent_messages(
    bench: Bench, sound: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, bench.session.sound = [100.0], sound
    monkeypatch.setattr("ridgeline.serve.engine.worker.time.perf_counter", lambda: clock[0])
    bench.session.steps = ["token"]
    bench.send(Submit(0, REQUEST, 0.0, False))
    bench.turn()
    for turn in range(9):
        bench.send(Abort(0), Ask(turn))
        assert bench.session.checks == int(turn > 3)
        bench.turn()
        clock[0] += 0.4
    assert bench.session.checks == 1
    assert bench.worker._meters.page_checks == {"agreed" if sound else "wrong": 1}


def test_a_pipe_whose_file_has_a_large_number() -> None:
    """The engine process inherits the file number that the pipe has in a server with a thousand connections."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 2000:
        pytest.skip(f"this system gives a process {hard} files at most")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2000), hard))
    try:
        ours, theirs = socket.socketpair()
        high = os.dup2(theirs.fileno(), 1500)
        theirs.close()
        inbox = Inbox(connect(f"file:{high}"))
        ours.sendall(frame(Ask(3)))
        assert inbox.read(1.0) == [Ask(3)]
        with pytest.raises(OSError):
            os.fstat(high)
        inbox.close()
        ours.close()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


KNOWN = "known"


class SlowGrammars:
    """Fake grammars. A new structure is compiled and recorded when the test allows it, a known one at once."""

    def __init__(self) -> None:
        self.may, self.begun, self.compiled = threading.Event(), threading.Semaphore(0), list[str]()

    def is_known(self, structure: StructuredOutputs) -> bool:
        return structure.regex == KNOWN

    def compile(self, structure: StructuredOutputs) -> object:
        if not self.is_known(structure):
            self.begun.release()
            assert self.may.wait(timeout=60)
            self.compiled.append(str(structure.regex))
        return object()


def structured(number: int, regex: str = "") -> Submit:
    params = SamplingParams(structured_outputs=StructuredOutputs(regex=regex or str(number)))
    return Submit(number, GenerationRequest((1,), params, ()), 0.0, False)


def test_an_aborted_structure_is_not_compiled() -> None:
    grammars: Any = SlowGrammars()
    compiler = Compiler(grammars, lambda: None)
    for number in range(6):
        compiler.add(structured(number))
    for _ in range(THREADS):
        assert grammars.begun.acquire(timeout=60)
    for number in range(1, 5):
        compiler.abort(number)
    grammars.may.set()
    compiler._checking.shutdown()
    assert sorted(grammars.compiled) == ["0", "1", "5"]  # the job of 1 had already started
    assert [submit.id for submit, _ in compiler.done()] in ([0, 5], [5, 0])


def test_new_structures_do_not_delay_known_ones_and_are_bounded() -> None:
    grammars: Any = SlowGrammars()
    woken = threading.Semaphore(0)
    compiler = Compiler(grammars, woken.release)
    for number in range(MAX_NEW + 1):
        compiler.add(structured(number))
    compiler.add(structured(1000, KNOWN))
    assert woken.acquire(timeout=60) and woken.acquire(timeout=60)
    found = {submit.id: error for submit, error in compiler.done()}
    assert set(found) == {MAX_NEW, 1000} and found[1000] is None
    assert isinstance(found[MAX_NEW], HelpersBusy) and "try again" in str(found[MAX_NEW])
    grammars.may.set()
    compiler._checking.shutdown()
    assert sorted(submit.id for submit, _ in compiler.done()) == list(range(MAX_NEW))
