"""The server as an ASGI application, for other HTTP servers: the proxy of Ray Serve, or uvicorn.

Requests are checked, counted and answered as those of `ridgeline serve`. The other server has the connections, so
timeouts of clients and the limit of connections are its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ridgeline.errors import RidgelineError
from ridgeline.serve.app import build_app
from ridgeline.serve.http.sse import WIRE
from ridgeline.serve.service import Service

MOST_UNSENT_BYTES = 1 << 20  # of a stream that the other server does not take, after which it waits

# Opens the model, and closes it at the end.
OpenService = Callable[[], AbstractAsyncContextManager[Service]]


class Application:
    """Loads the model at the start of the other server, and ends the engines at its end (ASGI's lifespan)."""

    def __init__(self, open_service: OpenService) -> None:
        self._open_service = open_service
        self._app: ASGIApp = _unready

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        elif scope["type"] == "http":
            async with _wire(send) as wire:
                extensions = {**(scope.get("extensions") or {}), WIRE: wire}
                await self._app({**scope, "extensions": extensions}, receive, wire.send)
        elif scope["type"] == "websocket":  # no endpoint is one
            await receive()
            await send({"type": "websocket.close"})

    async def _live(self, receive: Receive, send: Send) -> None:
        await receive()
        async with AsyncExitStack() as stack:
            try:
                self._app = build_app(await stack.enter_async_context(self._open_service()))
            except Exception as e:  # without this message some servers go on without the model
                await send({"type": "lifespan.startup.failed", "message": str(e) or type(e).__name__})
                if not isinstance(e, RidgelineError):
                    raise
                return
            await send({"type": "lifespan.startup.complete"})
            await receive()
        await send({"type": "lifespan.shutdown.complete"})


async def _unready(scope: Scope, receive: Receive, send: Send) -> None:
    raise RuntimeError("the HTTP server sent a request before it started the application (ASGI's lifespan)")


class MessageWire:
    """Implements sse.Wire with ASGI messages. Pieces that are written while a message is on its way go together."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._changed: Callable[[], None] | None = None
        self._unsent = bytearray()
        self._sending: asyncio.Task[None] | None = None

    @property
    def paused(self) -> bool:
        """Return whether the other server is too far behind to write more."""
        return len(self._unsent) > MOST_UNSENT_BYTES

    def write_chunk(self, data: bytes) -> None:
        """Write a piece of the body."""
        self._unsent += data
        if self._sending is None or self._sending.done():
            self._sending = asyncio.create_task(self._send_all())

    def keep(self) -> None:
        """Do nothing: pieces are joined in any case."""

    def flush(self) -> None:
        """Do nothing: pieces are sent as they come."""

    def listen(self, changed: Callable[[], None] | None) -> None:
        """Call `changed` whenever `paused` changes."""
        self._changed = changed

    async def send(self, message: Message) -> None:
        """Send a message after all pieces. The other server chooses how a body of unknown length is framed."""
        if self._sending is not None:
            await self._sending
        if message["type"] == "http.response.start":
            kept = [(name, value) for name, value in message.get("headers", ()) if name != b"transfer-encoding"]
            message = {**message, "headers": kept}
        await self._send(message)

    def close(self) -> None:
        """Drop what is unsent."""
        if self._sending is not None:
            self._sending.cancel()

    async def _send_all(self) -> None:
        while self._unsent:
            was_paused, data = self.paused, bytes(self._unsent)
            self._unsent.clear()
            await self._send({"type": "http.response.body", "body": data, "more_body": True})
            if was_paused and not self.paused and self._changed is not None:
                self._changed()


@asynccontextmanager
async def _wire(send: Send) -> AsyncIterator[MessageWire]:
    wire = MessageWire(send)
    try:
        yield wire
    finally:
        wire.close()
