"""The HTTP process's end of the pipe, without a process behind it."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import ridgeline
from ridgeline.archs import spec_from_config
from ridgeline.plan import EngineOptions, resolve
from ridgeline.serve.client import Answers, EngineClient, EngineDown, pinned
from ridgeline.serve.errors import APIError
from ridgeline.serve.messages import Abort, Embed, Ready, Start, frame
from ridgeline.serve.service import Gate
from ridgeline.serve.sse import DONE, Envelope, EventStream, event
from ridgeline.spec.recurrent import Mamba
from ridgeline.spec.request import OutputChunk

POCKET = Path(ridgeline.__file__).parent / "models" / "pocket" / "config.json"
READY = Ready(*[None] * 9)  # type: ignore[arg-type]


def client_without_engine(sent: list[Any]) -> EngineClient:
    """A client that is ready; what it would send is written down instead."""
    client = EngineClient("pocket", {}, lambda loading: None)
    client.state = "ready"
    client._send = sent.append  # type: ignore[method-assign]
    return client


def test_an_embedding_whose_client_leaves_is_aborted() -> None:
    sent: list[Any] = []

    async def run() -> None:
        task = asyncio.create_task(client_without_engine(sent).embed([[1]], "mean"))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(run())
    assert sent == [Embed(0, [[1]], "mean"), Abort(0)]


def test_a_start_that_fails_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """No files are left for a pipe; then something unexpected; then it starts."""
    tries = iter([OSError(24, "Too many open files"), ValueError("?"), None])
    client = EngineClient("pocket", {}, lambda loading: None)
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    def popen() -> Any:
        if isinstance(error := next(tries), OSError):
            raise error
        return error

    async def open_connection(sock: Any, limit: int) -> Any:
        if sock is not None:
            raise sock
        reader = asyncio.StreamReader()
        reader.feed_data(frame(READY))
        return reader, SimpleNamespace(write=lambda data: None, close=lambda: None)

    monkeypatch.setattr(client, "_popen", popen)
    monkeypatch.setattr("ridgeline.serve.client.asyncio.sleep", sleep)
    monkeypatch.setattr("ridgeline.serve.client.asyncio.open_connection", open_connection)
    asyncio.run(client._restart(0.0))
    assert (client.state, client.restarts, waits) == ("ready", 3, [0.0, 1.0, 2.0])


def test_a_message_that_cannot_be_taken_ends_the_engine_not_the_supervisor() -> None:
    client = EngineClient("pocket", {}, lambda loading: None)

    async def run() -> None:
        reader = asyncio.StreamReader()
        reader.feed_data(frame("nonsense"))
        await asyncio.wait_for(client._listen(reader), 5)

    asyncio.run(run())


def chunk(output: Any = None) -> OutputChunk:
    return OutputChunk(0, "a", (1,), (), None, None, None, output)


def test_places_are_free_when_the_engine_is_done() -> None:
    """Though nobody has read a thing; and once, whatever comes after."""

    async def run() -> None:
        left: list[str] = []
        answers = Answers([5, 6], lambda ids: None, lambda: left.append("over"))
        for number, output in ((5, None), (5, "done"), (6, None)):
            answers.put(number, chunk(output), 1.0)
        assert not left
        answers.put(6, chunk("done"), 2.0)
        assert left == ["over"]
        answers.close()
        assert left == ["over"] and len(await answers.batch()) == 4 and await answers.batch() == []

    asyncio.run(run())


def test_what_ends_one_request_ends_all_and_frees_their_places() -> None:
    async def run() -> None:
        left: list[str] = []
        ended: list[int] = []
        answers = Answers([5, 6], ended.extend, lambda: left.append("over"))
        answers.put(6, chunk(), 1.0)
        answers.fail(EngineDown("gone"))
        assert left == ["over"] and ended == [5, 6] and len(await answers.batch()) == 1
        with pytest.raises(EngineDown):
            await answers.batch()

    asyncio.run(run())


def test_idle_time_is_nobodys_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("ridgeline.serve.service.time.perf_counter", lambda: clock[0])
    gate = Gate(2, 0)
    for _ in range(20):  # an answer takes a second, and then nobody comes for an hour
        gate.enter(2)
        clock[0] += 2.0
        gate.leave(2)
        clock[0] += 3600
    gate.enter(2)
    with pytest.raises(APIError) as full:
        gate.enter(1)
    assert full.value.retry_after == 1


def test_only_events_with_tokens_are_timed() -> None:
    written: list[bytes] = []

    async def run() -> None:
        envelope = Envelope({"id": "x"})

        async def events() -> Any:
            yield envelope.event([{"index": 0}]) + envelope.event([{"index": 1}])
            yield envelope.event([], {"total_tokens": 2})
            yield event({"error": {}})
            yield DONE

        async def receive() -> Any:
            await asyncio.sleep(60)

        async def send(message: Any) -> None:
            written.append(message.get("body", b""))

        timed: list[int] = []
        await EventStream(events(), lambda: timed.append(len(written)), lambda: None)({}, receive, send)
        assert timed == [2] and len(written) == 6

    asyncio.run(run())


def test_a_reader_that_takes_nothing_counts_as_gone(caplog: pytest.LogCaptureFixture) -> None:
    closed: list[bool] = []

    async def run() -> None:
        async def events() -> Any:
            while True:
                yield Envelope({"id": "x"}).event([{"index": 0}])

        async def receive() -> Any:
            await asyncio.sleep(60)

        taken = 0

        async def send(message: Any) -> None:
            nonlocal taken
            taken += 1
            if taken > 3:
                await asyncio.sleep(60)

        stream = EventStream(events(), lambda: None, lambda: closed.append(True), patience_s=0.05)
        await asyncio.wait_for(stream({}, receive, send), 10)

    asyncio.run(run())
    assert closed == [True] and "took nothing" in caplog.text


@pytest.mark.parametrize("kind", ["attention", "hybrid"])
@pytest.mark.parametrize("free", [1 << 28, 1 << 32])
def test_a_new_engine_has_the_settings_of_the_first(kind: str, free: int) -> None:
    """Whatever memory is free by then."""
    spec = spec_from_config(json.loads(POCKET.read_text()))
    if kind == "hybrid":
        spec = replace(spec, layers=(replace(spec.layers[0], mixer=Mamba(256, 16, 4, 16)), *spec.layers[1:]))
    first = resolve(spec, 2048, EngineOptions(), free_bytes=free, fixed_len=False)
    options = pinned(Start("m", {"device": "cpu"}), first).options
    assert options["device"] == "cpu"
    then = resolve(spec, options["max_model_len"], options["engine"], free_bytes=8 << 30, fixed_len=True)
    names = ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "block_size", "checkpoint_tokens",
             "num_pages", "num_host_pages", "steps_in_flight")  # fmt: skip
    assert [getattr(then, n) for n in names] == [getattr(first, n) for n in names]
