"""The server as an ASGI application: streams as messages, and its life with another HTTP server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from starlette.types import Message, Receive, Scope, Send

from ridgeline.errors import RequestError
from ridgeline.serve import asgi
from ridgeline.serve.asgi import MOST_UNSENT_BYTES, Application, MessageWire
from ridgeline.serve.http.sse import WIRE


def test_pieces_are_joined_and_stay_in_order() -> None:
    """A piece that meets a message on its way waits for it, and the end of the body comes last."""

    async def run() -> None:
        sent, gate = list[Message](), asyncio.Event()

        async def send(message: Message) -> None:
            await gate.wait()
            sent.append(message)

        wire = MessageWire(send)
        changes = list[bool]()
        wire.listen(lambda: changes.append(wire.paused))
        gate.set()
        headers = [(b"transfer-encoding", b"chunked"), (b"cache-control", b"no-cache")]
        await wire.send({"type": "http.response.start", "status": 200, "headers": headers})
        assert sent.pop()["headers"] == headers[1:]
        gate.clear()
        for i in range(100):
            wire.write_chunk(b"%03d" % i)
            await asyncio.sleep(0)
        wire.write_chunk(b"x" * (MOST_UNSENT_BYTES + 1))
        assert wire.paused and not changes
        gate.set()
        await wire.send({"type": "http.response.body", "body": b"", "more_body": False})
        assert not wire.paused and len(sent) <= 4 and sent[-1]["more_body"] is False
        body = b"".join(each["body"] for each in sent)
        assert body == b"".join(b"%03d" % i for i in range(100)) + b"x" * (MOST_UNSENT_BYTES + 1)
        assert changes == [False]

    asyncio.run(run())


def test_a_client_that_left_leaves_nothing_behind() -> None:
    async def run() -> None:
        async def send(message: Message) -> None:
            await asyncio.Event().wait()

        wire = MessageWire(send)
        wire.write_chunk(b"a")
        task = wire._sending
        await asyncio.sleep(0)
        wire.close()
        await asyncio.sleep(0)
        assert task is not None and task.cancelled()

    asyncio.run(run())


async def _live(application: Application, says: list[str]) -> asyncio.Queue[Message]:
    """Start an application; return the queue of its further events of life."""
    events = asyncio.Queue[Message]()

    async def send(message: Message) -> None:
        says.append(message["type"] + message.get("message", ""))

    events.put_nowait({"type": "lifespan.startup"})
    task = asyncio.create_task(application({"type": "lifespan"}, events.get, send))
    while not says:
        await asyncio.sleep(0.01)
    events.task = task  # type: ignore[attr-defined]
    return events


def test_the_model_lives_as_long_as_the_other_server(monkeypatch: Any) -> None:
    async def run() -> None:
        seen, life, says = list[Scope](), list[str](), list[str]()

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            seen.append(scope)
            await send({"type": "http.response.start", "status": 200, "headers": []})

        monkeypatch.setattr(asgi, "build_app", lambda service: app)

        @asynccontextmanager
        async def opened() -> AsyncIterator[Any]:
            life.append("open")
            yield None
            life.append("closed")

        application = Application(opened)
        events = await _live(application, says)
        assert says == ["lifespan.startup.complete"] and life == ["open"]
        answered = list[Message]()

        async def send(message: Message) -> None:
            answered.append(message)

        await application({"type": "http", "path": "/", "extensions": {"more": {}}}, events.get, send)
        assert isinstance(seen[0]["extensions"][WIRE], MessageWire) and "more" in seen[0]["extensions"]
        assert answered[0]["status"] == 200
        events.put_nowait({"type": "lifespan.shutdown"})
        await events.task  # type: ignore[attr-defined]
        assert life == ["open", "closed"] and says[-1] == "lifespan.shutdown.complete"

    asyncio.run(run())


def test_a_model_that_cannot_be_loaded_is_said() -> None:
    async def run() -> None:
        says = list[str]()

        @asynccontextmanager
        async def opened() -> AsyncIterator[Any]:
            raise RequestError("no such model")
            yield None

        await _live(Application(opened), says)
        assert says == ["lifespan.startup.failedno such model"]

    asyncio.run(run())
