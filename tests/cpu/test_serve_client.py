"""The HTTP process's end of the pipe, without an engine process."""

from __future__ import annotations

import asyncio
import json
import pickle
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import ridgeline
from ridgeline.archs import spec_from_config
from ridgeline.serve.api.choices import ChoiceEvents
from ridgeline.serve.api.tally import Tally
from ridgeline.serve.api.types import StreamOptions
from ridgeline.serve.engine.client import Answers, EngineClient, EngineDown, StartFailed, pinned
from ridgeline.serve.engine.messages import Abort, Beat, Chunks, Embed, Ready, Start
from ridgeline.serve.engine.watch import EngineSilent, Patience, Watch
from ridgeline.serve.gate import Gate
from ridgeline.serve.http.errors import APIError
from ridgeline.serve.http.sse import DONE, WIRE, EventStream
from ridgeline.serve.http.wire import TransportWire
from ridgeline.serve.service import Turn
from ridgeline.settings import EngineOptions, resolve
from ridgeline.spec.mamba import Mamba
from ridgeline.spec.request import CompletionOutput, OutputChunk, RequestOutput, Timing

POCKET = Path(ridgeline.__file__).parent / "models" / "pocket" / "config.json"
READY = Ready(*[None] * 10)  # type: ignore[arg-type]


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not true():
            await asyncio.sleep(0)


def client_without_engine(sent: list[Any]) -> EngineClient:
    """Return a client that is ready, and the list of the messages that it sends."""
    client = EngineClient("pocket", {}, lambda loading: None)
    client.state = "ready"
    client._send = sent.append  # type: ignore[method-assign]
    return client


def test_an_embedding_whose_client_disconnects_is_aborted() -> None:
    sent: list[Any] = []

    async def run() -> None:
        task = asyncio.create_task(client_without_engine(sent).embed([[1]], "mean"))
        await until(lambda: bool(sent))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(run())
    assert sent == [Embed(0, [[1]], "mean"), Abort(0)]


class Scripted:
    """An `EngineProcess` that sends given messages, and then ends."""

    pid, ahead_s, shares_cores = 0, 0.0, True

    def __init__(self, *messages: Any) -> None:
        self._messages = iter(messages)

    async def read(self) -> bytes:
        try:
            return pickle.dumps(next(self._messages))
        except StopIteration:
            raise ConnectionError from None

    def write(self, data: bytes) -> None:
        pass

    async def end(self, patience_s: float) -> str:
        return ""


def test_a_failed_start_is_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first start finds no free file descriptor, the second raises an unexpected error, the third succeeds."""
    tries = iter([OSError(24, "Too many open files"), ValueError("?"), None])
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    async def start() -> Scripted:
        if error := next(tries):
            raise error
        return Scripted(READY)

    client = EngineClient("pocket", {}, lambda loading: None, start_process=start)
    monkeypatch.setattr("ridgeline.serve.engine.client.asyncio.sleep", sleep)
    asyncio.run(client._restart(0.0))
    assert (client.state, client.restarts, waits) == ("ready", 3, [0.0, 1.0, 2.0])


def test_an_engine_that_sleeps_has_no_process_until_it_wakes() -> None:
    """A second process starts at the wake; one that cannot be started leaves the engine asleep."""
    starts = iter([True, False, True])

    class Lasting(Scripted):
        async def read(self) -> bytes:
            try:
                return await super().read()
            except ConnectionError:
                await asyncio.Event().wait()
                raise

    async def start() -> Scripted:
        if not next(starts):
            raise OSError(24, "Too many open files")
        return Lasting(READY)

    async def run() -> None:
        client = EngineClient("pocket", {}, lambda loading: None, start_process=start)
        client.pin = lambda config: None  # type: ignore[method-assign]
        await client.start()
        waiting = asyncio.create_task(client.embed([[1]], "mean"))
        await asyncio.sleep(0)
        await client.sleep()
        assert client.state == "sleeping" and not client.up and isinstance((await _end_of(waiting)), EngineDown)
        for again in (client.sleep(), client.embed([[1]], "mean")):
            assert isinstance(await _end_of(asyncio.ensure_future(again)), EngineDown)
        assert isinstance(await _end_of(asyncio.ensure_future(client.wake())), StartFailed)
        assert client.state == "sleeping"
        await client.wake()
        assert client.up and client.restarts == 1
        await client.close()

    asyncio.run(run())


async def _end_of(task: asyncio.Future[Any]) -> Any:
    """Return the result of a task, or its exception."""
    (found,) = await asyncio.gather(task, return_exceptions=True)
    return found


def test_an_invalid_message_restarts_the_engine() -> None:
    client = EngineClient("pocket", {}, lambda loading: None)
    asyncio.run(asyncio.wait_for(client._listen(Scripted("nonsense")), 5))


def chunk(output: Any = None) -> OutputChunk:
    return OutputChunk(0, "a", (1,), (), None, None, None, output)


def result(tokens: int) -> RequestOutput:
    answer = CompletionOutput(0, list(range(tokens)))
    return RequestOutput("", [1], [answer], Timing(0.0, None, 0.0, 0.0))


def test_slots_are_free_when_the_engine_is_done() -> None:
    """The slots are freed exactly once, even if the client has read nothing yet."""

    async def run() -> None:
        left: list[str] = []
        answers = Answers([5, 6], lambda ids: None, lambda: left.append("over"))
        for number, output in ((5, None), (5, "done"), (6, None)):
            answers.put(number, chunk(output), 1.0)
        assert not left
        answers.put(6, chunk("done"), 2.0)
        assert left == ["over"]
        answers.close()
        assert left == ["over"] and len(answers.take()) == 4 and not answers.waiting and answers.take() == []

    asyncio.run(run())


def test_a_failed_request_ends_all_and_frees_their_slots() -> None:
    async def run() -> None:
        left: list[str] = []
        ended: list[int] = []
        answers = Answers([5, 6], ended.extend, lambda: left.append("over"))
        answers.put(6, chunk(), 1.0)
        answers.fail(EngineDown("gone"))
        answers.check()
        assert left == ["over"] and ended == [5, 6] and len(answers.take()) == 1
        await answers.wait()
        for what in (answers.check, answers.take):
            with pytest.raises(EngineDown):
                what()

    asyncio.run(run())


def test_idle_time_does_not_count_for_the_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("ridgeline.serve.gate.time.perf_counter", lambda: clock[0])
    gate = Gate(2, 0)
    for _ in range(20):  # an answer takes a second, and then there is no request for an hour
        gate.enter(2)
        clock[0] += 2.0
        gate.leave(2)
        clock[0] += 3600
    gate.enter(2)
    with pytest.raises(APIError) as full:
        gate.enter(1)
    assert full.value.retry_after == 1


class FakeWire:
    """A wire that records its writes and pauses after a number of them."""

    def __init__(self, room: int = 1000) -> None:
        self.written: list[bytes] = []
        self.room, self.gone, self.asked = room, asyncio.Event(), asyncio.Event()
        self.changed: Any = None

    @property
    def paused(self) -> bool:
        return len(self.written) >= self.room

    def write_chunk(self, data: bytes) -> None:
        self.written.append(data)
        if self.paused:
            self.changed()

    def keep(self) -> None:
        pass

    def flush(self) -> None:
        pass

    def listen(self, changed: Any) -> None:
        self.changed = changed

    async def receive(self) -> Any:
        self.asked.set()  # the stream runs and waits for answers
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def stream(self, answers: Answers, timed: list[float]) -> list[Any]:
        """Run a stream to its end; return the ASGI messages that did not go to the wire."""
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        turn = Turn([], answers, None)
        tally = Tally([])
        events = ChoiceEvents(
            {"id": "x"}, StreamOptions(include_usage=True), tally, Tally.usage,
            lambda _, chunk: [b'{"text":"%b"}' % chunk.text.encode()] if chunk.text else [],
        )  # fmt: skip
        response = EventStream(turn, events, timed.append)
        await asyncio.wait_for(response({"extensions": {WIRE: self}}, self.receive, send), 10)
        return sent


def test_streams_are_written_at_once_and_only_tokens_are_timed() -> None:
    async def run() -> None:
        client, wire, timed = client_without_engine([]), FakeWire(), list[float]()
        answers = client.submit([None], 0.0, stream=True, on_done=lambda: None)  # type: ignore[list-item]
        task = asyncio.create_task(wire.stream(answers, timed))
        await wire.asked.wait()
        for text, ids, output in (("a", (1,), None), ("", (2,), None), ("b", (), None), ("c", (3,), result(3))):
            client._take(Chunks(1.0, [(0, (0, text, ids, (), None, None, None, output))], True))
            await until(lambda: answers.waiting or task.done())
        sent = await task
        assert [data.count(b"data: ") for data in wire.written] == [1, 1, 3]  # the last with usage and [DONE]
        assert wire.written[-1].endswith(DONE) and len(timed) == 2
        assert [m["type"] for m in sent] == ["http.response.start", "http.response.body"]
        assert (b"transfer-encoding", b"chunked") in sent[0]["headers"] and wire.changed is None

    asyncio.run(run())


@pytest.mark.parametrize(
    ("texts", "writes"), [(["a", "b"], ["HEAD data", "data data END"]), (["", "b"], ["HEAD", "data data END"])]
)
def test_headers_and_end_go_with_events(texts: list[str], writes: list[str]) -> None:
    """Only if the first chunk has no event, the headers are written alone. The one chunk of an answer is one write."""

    async def run(texts: list[str]) -> list[str]:
        written: list[bytes] = []
        transport: Any = SimpleNamespace(write=written.append, is_closing=lambda: False)
        wire, fake, answers = TransportWire(transport), FakeWire(), Answers([5], lambda ids: None)

        async def send(message: Any) -> None:  # as uvicorn
            wire.write(b"HEAD" if message["type"] == "http.response.start" else b"END")

        events = ChoiceEvents(
            {}, None, Tally([]), Tally.usage, lambda _, chunk: [b"{}"] if chunk.text else []
        )  # fmt: skip
        response = EventStream(Turn([], answers, None), events, lambda seconds: None)
        task = asyncio.create_task(response({"extensions": {WIRE: wire}}, fake.receive, send))
        await fake.asked.wait()
        for i, text in enumerate(texts):
            output = result(4) if i == len(texts) - 1 else None
            answers.put(5, OutputChunk(0, text, (1,), (), None, None, None, output), 1.0)
            answers.notify()
            await asyncio.sleep(0.001)
        await asyncio.wait_for(task, 10)
        return [" ".join(re.findall("HEAD|data|END", data.decode())) for data in written]

    assert asyncio.run(run(texts)) == writes
    assert asyncio.run(run(["a"])) == ["HEAD data data END"]


def test_an_answer_that_fails_has_all_its_text() -> None:
    """The last text and the error come in one message."""

    async def run() -> bytes:
        wire, answers = FakeWire(), Answers([5], lambda ids: None)
        task = asyncio.create_task(wire.stream(answers, list[float]()))
        await wire.asked.wait()
        answers.put(5, OutputChunk(0, "before", (1,)), 1.0)
        answers.put(5, OutputChunk(0, "", (), (), "error", None, "no token", result(1)), 1.0)
        answers.notify()
        await task
        return b"".join(wire.written)

    assert re.findall(b"before|no token|DONE", asyncio.run(run())) == [b"before", b"no token", b"DONE"]


def test_a_client_that_catches_up_gets_everything_in_one_write() -> None:
    async def run() -> None:
        wire, timed, answers = FakeWire(room=1), list[float](), Answers([5], lambda ids: None)
        task = asyncio.create_task(wire.stream(answers, timed))
        await wire.asked.wait()
        for i in range(4):
            answers.put(5, chunk(result(4) if i == 3 else None), 1.0)
            answers.notify()
            await asyncio.sleep(0.001)  # the first one starts the response
        assert len(wire.written) == 1
        wire.room = 1000
        wire.changed()
        await task
        assert [data.count(b'"text"') for data in wire.written] == [1, 3]

    asyncio.run(run())


@pytest.mark.parametrize(("error", "raised"), [(EngineDown("gone"), None), (KeyError("?"), KeyError)])
def test_an_error_is_the_last_event_of_a_stream(error: Exception, raised: type[Exception] | None) -> None:
    async def run() -> None:
        wire, answers = FakeWire(), Answers([5], lambda ids: None)
        answers.put(5, chunk(), 1.0)
        answers.fail(error)
        if raised is None:
            await wire.stream(answers, [])
        else:  # a bug, which the guard logs
            with pytest.raises(raised):
                await wire.stream(answers, [])
        (data,) = wire.written
        assert data.count(b"data: ") == 3 and b"error" in data and data.endswith(DONE)

    asyncio.run(run())


@pytest.mark.parametrize("kind", ["attention", "hybrid"])
@pytest.mark.parametrize("free", [1 << 28, 1 << 32])
def test_a_new_engine_has_the_settings_of_the_first(kind: str, free: int) -> None:
    """The settings stay the same even if less memory is free."""
    spec = spec_from_config(json.loads(POCKET.read_text()))
    if kind == "hybrid":
        spec = replace(spec, layers=(replace(spec.layers[0], mixer=Mamba(256, 16, 4, 16)), *spec.layers[1:]))
    first = resolve(spec, 2048, EngineOptions(), free_bytes=free, fixed_len=False)
    options = pinned(Start("m", {"device": "cpu"}), first).options
    assert options["device"] == "cpu"
    then = resolve(spec, options["max_model_len"], options["engine"], free_bytes=8 << 30, fixed_len=True)
    names = ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "block_size", "state_snapshot_tokens",
             "num_pages", "num_host_pages", "steps_in_flight")  # fmt: skip
    assert [getattr(then, n) for n in names] == [getattr(first, n) for n in names]


@pytest.mark.parametrize(
    ("beats", "loading", "why"),
    [
        ([0.0] * 9, False, None), ([0.0, 5.0, 9.0], False, "in one step for more than 8 s"),
        ([], False, "--timeout-engine"), ([], True, "--timeout-step"), ([0.0, 7.0] * 4, True, None),
    ],
)  # fmt: skip
def test_a_hanging_engine_differs_from_a_long_step(
    beats: list[float], loading: bool, why: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is a heartbeat every 3 s on a fake clock, on which each wait takes 1 s."""
    clock = [0.0]

    async def wait(tasks: Any, timeout: float) -> None:
        clock[0] += 1.0
        if clock[0] % 3 == 0 and beats:
            watch.heard(Beat(beats.pop(0)))
            over.set() if not beats and why is None else None
        await asyncio.sleep(0)

    async def run() -> None:
        if why is None:
            await watch.run(over.wait(), loading=loading)
        else:
            with pytest.raises(EngineSilent, match=re.escape(why)):
                await watch.run(over.wait(), loading=loading)

    monkeypatch.setattr("ridgeline.serve.engine.watch.TICK_SECONDS", 1.0)
    monkeypatch.setattr("ridgeline.serve.engine.watch.time.monotonic", lambda: clock[0])
    monkeypatch.setattr("ridgeline.serve.engine.watch.asyncio.wait", wait)
    watch, over = Watch(Patience(2.0, 5.0, 8.0)), asyncio.Event()
    asyncio.run(run())


def test_time_without_the_http_process_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """The computer was suspended, or the HTTP process was stopped, so the engine did not hang."""
    clock = [0.0]

    async def wait(tasks: Any, timeout: float) -> None:
        clock[0] += 3600.0
        over.set()
        await asyncio.sleep(0)

    monkeypatch.setattr("ridgeline.serve.engine.watch.time.monotonic", lambda: clock[0])
    monkeypatch.setattr("ridgeline.serve.engine.watch.asyncio.wait", wait)
    watch, over = Watch(Patience()), asyncio.Event()

    async def run() -> None:
        await watch.run(over.wait())

    asyncio.run(run())
    assert not watch.silent and watch.silent_s < 1
