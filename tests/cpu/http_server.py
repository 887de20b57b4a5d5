"""Run the HTTP server without a model: a small application behind our protocol, in the test's own event loop."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import uvicorn

from ridgeline.serve.http.connections import Connections, Timeouts
from ridgeline.serve.http.protocol import Protocol
from ridgeline.serve.server import HTTPServer

LONG = 60.0  # seconds; no test waits that long


class App:
    """Echoes bodies, and handles some paths in a special way. begun: set when a request of /wait has arrived."""

    def __init__(self) -> None:
        self.begun, self.go = asyncio.Event(), asyncio.Event()
        self.ended: list[str] = []  # the outcome of each request of /wait

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        path, body, headers = scope["path"], b"", []
        if path == "/early":  # answers before it has read the body
            await self._answer(send, 401, b"who?", [(b"connection", b"close")])
            return
        message = {"more_body": True}
        while message.get("more_body"):
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body += message["body"]
        if path == "/wait":
            self.begun.set()
            gone, go = asyncio.ensure_future(receive()), asyncio.ensure_future(self.go.wait())
            await asyncio.wait((gone, go), return_when=asyncio.FIRST_COMPLETED)
            self.ended.append("gone" if gone.done() else "done")
            gone.cancel()
            body = b"waited"
        elif path == "/large":
            body = b"x" * int(body)
        elif path == "/stream":
            await self._stream(scope, send, int(body))
            return
        await self._answer(send, 200, body, headers)

    async def _answer(self, send: Any, status: int, body: bytes, headers: list[tuple[bytes, bytes]]) -> None:
        headers = [(b"content-length", str(len(body)).encode()), *headers]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _stream(self, scope: Any, send: Any, events: int) -> None:
        """Write events as sse.EventStream does."""
        wire = scope["extensions"]["ridgeline.wire"]
        await send({"type": "http.response.start", "status": 200, "headers": [(b"transfer-encoding", b"chunked")]})
        for i in range(events):
            wire.write_chunk(b"data: %d\n\n" % i)
            while wire.paused:
                await asyncio.sleep(0.001)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class Running:
    """A server that runs, and its connections."""

    def __init__(self, server: HTTPServer, connections: Connections, app: Any, port: int) -> None:
        self.server, self.connections, self.app, self.port = server, connections, app, port

    async def open(self, data: bytes = b"") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Return a connection that has sent `data`."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(data)
        await writer.drain()
        return reader, writer

    async def ask(self, data: bytes) -> bytes:
        """Send `data` and return everything that the server answers before it closes."""
        reader, writer = await self.open(data)
        found = await asyncio.wait_for(reader.read(), 20)
        writer.close()
        return found

    async def until(self, true: Callable[[], bool]) -> None:
        """Wait until a condition is true, 20 s at most."""
        async with asyncio.timeout(20):
            while not true():
                await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def running(
    app: Any = None, limit: int = 100, reserve: int = 2, listener: socket.socket | None = None, **timeouts: float
) -> AsyncIterator[Running]:
    """Run a server; timeouts that are not given are long."""
    listener = listener or socket.create_server(("127.0.0.1", 0), backlog=2048)
    app = app or App()
    all_timeouts = Timeouts(**{"headers": LONG, "body": LONG, "keep_alive": LONG, "write": LONG, **timeouts})
    connections = Connections(limit, all_timeouts, reserve)
    config = uvicorn.Config(
        app, http=Protocol, ws="none", lifespan="off", log_config=None, access_log=False, timeout_graceful_shutdown=0
    )
    config.load()
    server = HTTPServer(config, listener, connections, lambda: None, lambda: None)
    await server.startup()
    try:
        yield Running(server, connections, app, listener.getsockname()[1])
    finally:
        server.force_exit = True
        await server.shutdown()


def scenario(test: Callable[..., Awaitable[None]], **options: Any) -> None:
    """Run a test with a server."""

    async def run() -> None:
        async with running(**options) as server:
            await test(server)

    asyncio.run(run())


def request(path: str, body: bytes = b"", *headers: str, version: str = "1.1", method: str = "POST") -> bytes:
    """Return the bytes of a complete request."""
    lines = [f"{method} {path} HTTP/{version}", "host: 127.0.0.1", f"content-length: {len(body)}", *headers]
    return "\r\n".join([*lines, "", ""]).encode() + body


def json_of(answer: bytes) -> Any:
    """Return the JSON of an answer."""
    return json.loads(answer.partition(b"\r\n\r\n")[2])
