"""Server-sent events: write an answer as a stream, and end the request when the client disconnects."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Protocol, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ridgeline.serve.engine.client import Batch
from ridgeline.serve.http.errors import APIError, as_api_error, dumps, internal

T = TypeVar("T")
WIRE = "ridgeline.wire"  # key in the extensions of a request's ASGI scope

DONE = b"data: [DONE]\n\n"
CLIENT_GONE = 499  # nginx's status for a client that disconnected; it is only logged


def event(value: Any, name: str | None = None) -> bytes:
    """Return an event with a JSON object. name: type of the event."""
    kind = b"" if name is None else b"event: " + name.encode() + b"\n"
    return kind + b"data: " + dumps(value) + b"\n\n"


class Envelope:
    """Writes the events of one answer, which differ only in their choices. head: the fields that all have in common."""

    def __init__(self, head: Mapping[str, Any]) -> None:
        self._begin = b"data: " + dumps(head)[:-1] + b',"choices":['

    def event(self, choice: bytes, usage: Mapping[str, Any] | None = None) -> bytes:
        """Return an event with one choice, given as JSON, or with none if it is empty."""
        used = b"" if usage is None else b',"usage":' + dumps(usage)
        return b"%b%b]%b}\n\n" % (self._begin, choice, used)


class Wire(Protocol):
    """A request's connection, for writing chunks directly. An ASGI message would pass through eight layers."""

    @property
    def paused(self) -> bool:
        """Return whether the client is too far behind with reading to write more."""

    def write_chunk(self, data: bytes) -> None:
        """Write a piece of the body, to the socket at once unless the client is behind with reading."""

    def keep(self) -> None:
        """Keep the next bytes of the answer until the bytes after them, so that one write sends both."""

    def flush(self) -> None:
        """Write the bytes that were kept."""

    def listen(self, changed: Callable[[], None] | None) -> None:
        """Call `changed` whenever `paused` changes."""


class Source(Protocol):
    """A source of chunks, such as service.Turn."""

    @property
    def committed(self) -> float: ...

    @property
    def waiting(self) -> bool: ...

    def check(self) -> None: ...

    def take(self) -> Batch: ...

    def listen(self, news: Callable[[], None]) -> None: ...

    def close(self) -> None: ...


class Events(Protocol):
    """Writes an answer as events. Every method returns bytes, b"" if there is nothing to write."""

    def begin(self) -> bytes:
        """Return the events before the first chunk."""

    def chunks(self, batch: Batch) -> bytes:
        """Return the events of new chunks. Raises APIError for an answer that failed."""

    def end(self) -> bytes:
        """Return the last events of a complete answer."""

    def failed(self, error: APIError) -> bytes:
        """Return the last events of an answer that ended with an error."""


class EventStream(Response):
    """Writes the chunks of a turn as events, each message of the engine in one write.

    An error before the first chunk is raised before the response starts, so that it gets its own status. written:
    called after each write with tokens, with the seconds since the engine made them. A slow client delays only its own
    events, until the connection's write timeout ends the stream.
    """

    def __init__(
        self, turn: Source, events: Events, written: Callable[[float], None],
        media_type: str = "text/event-stream",
    ) -> None:  # fmt: skip
        self.media_type = media_type
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self.headers["transfer-encoding"] = "chunked"  # the format of Wire.write_chunk
        self._turn, self._events, self._written = turn, events, written
        self._over = asyncio.get_running_loop().create_future()  # True: all is written; False: the client is gone

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._wire: Wire = scope["extensions"][WIRE]
        gone = asyncio.create_task(_gone(receive))
        gone.add_done_callback(lambda _: self._end(False))
        try:
            await self._first(gone)
            self._turn.check()
            self._wire.keep()  # the headers go with the first events, and the end of the body with the last ones
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            self._begin()
            if await self._over:
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self._end(False)
            self._wire.flush()
            self._wire.listen(None)
            gone.cancel()
            await asyncio.gather(gone, return_exceptions=True)
            self._turn.close()

    async def _first(self, gone: asyncio.Task[None]) -> None:
        """Wait until there is something to write or the client is gone."""
        arrived = asyncio.Event()
        gone.add_done_callback(lambda _: arrived.set())
        self._turn.listen(arrived.set)
        if self._turn.waiting:
            await arrived.wait()

    def _end(self, written: bool) -> None:
        if not self._over.done():
            self._over.set_result(written)

    def _begin(self) -> None:
        if data := self._events.begin():
            self._wire.write_chunk(data)
        self._wire.listen(self._advance)
        self._turn.listen(self._advance)
        self._advance()
        if not self._over.done():
            self._wire.flush()  # the first chunk may have no event

    def _advance(self) -> None:
        """Write the chunks that have arrived."""
        if self._wire.paused or self._over.done():
            return
        data, tokens = b"", False
        try:
            while not self._turn.waiting and not self._over.done():
                if batch := self._turn.take():
                    tokens = tokens or any(chunk.token_ids for _, chunk in batch)
                    for item in batch:  # one by one: if an answer fails, the chunks before are written
                        data += self._events.chunks([item])
                else:
                    data += self._events.end()
                    self._end(True)
        except Exception as e:  # the last event has the error; a bug is raised too
            api_error = as_api_error(e)
            data += self._events.failed(api_error or internal())
            self._end(True) if api_error is not None else self._over.set_exception(e)
        if data:
            if self._over.done():
                self._wire.keep()
            self._wire.write_chunk(data)
            if tokens:
                self._written(time.perf_counter() - self._turn.committed)


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T | Response:
    """Return the result of `work`, which is cancelled if the client disconnects first."""
    task = asyncio.create_task(work)
    gone = asyncio.create_task(_gone(request.receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        return Response(status_code=CLIENT_GONE)
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
