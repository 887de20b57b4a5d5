"""The server as an ASGI application: streams as messages, and its life with another HTTP server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import pytest
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


class Life(NamedTuple):
    """The task of an application's life, and the queue of its further events."""

    task: asyncio.Task[None]
    events: asyncio.Queue[Message]


async def _live(application: Application, says: list[str]) -> Life:
    """Start an application, and wait until it says something or ends."""
    events = asyncio.Queue[Message]()

    async def send(message: Message) -> None:
        says.append(message["type"] + message.get("message", ""))

    events.put_nowait({"type": "lifespan.startup"})
    task = asyncio.create_task(application({"type": "lifespan"}, events.get, send))
    async with asyncio.timeout(20):
        while not says and not task.done():
            await asyncio.sleep(0.01)
    return Life(task, events)


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
        life_task, events = await _live(application, says)
        assert says == ["lifespan.startup.complete"] and life == ["open"]
        answered = list[Message]()

        async def send(message: Message) -> None:
            answered.append(message)

        await application({"type": "http", "path": "/", "extensions": {"more": {}}}, events.get, send)
        assert isinstance(seen[0]["extensions"][WIRE], MessageWire) and "more" in seen[0]["extensions"]
        assert answered[0]["status"] == 200
        events.put_nowait({"type": "lifespan.shutdown"})
        await life_task
        assert life == ["open", "closed"] and says[-1] == "lifespan.shutdown.complete"

    asyncio.run(run())


@pytest.mark.parametrize(
    ("error", "said"),
    ((RequestError("no such model"), "no such model"), (OSError("no file"), "no file"), (KeyError(), "KeyError")),
)
def test_a_model_that_cannot_be_loaded_is_said(error: Exception, said: str) -> None:
    """An error that is not the user's is raised too, so that the other server logs where it was."""

    async def run() -> None:
        says = list[str]()

        @asynccontextmanager
        async def opened() -> AsyncIterator[Any]:
            raise error
            yield None

        task, _ = await _live(Application(opened), says)
        assert says == ["lifespan.startup.failed" + said]
        (raised,) = await asyncio.gather(task, return_exceptions=True)
        assert raised is (None if isinstance(error, RequestError) else error)

    asyncio.run(run())


def test_a_websocket_is_closed() -> None:
    async def run() -> None:
        sent = list[Message]()

        @asynccontextmanager
        async def never() -> AsyncIterator[Any]:
            raise AssertionError("no model is needed")
            yield None

        async def receive() -> Message:
            return {"type": "websocket.connect"}

        async def send(message: Message) -> None:
            sent.append(message)

        await Application(never)({"type": "websocket", "path": "/"}, receive, send)
        assert sent == [{"type": "websocket.close"}]

    asyncio.run(run())
