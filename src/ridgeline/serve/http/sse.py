"""Server-sent events: a response that is written as its events come, and that ends when its reader goes away."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ridgeline.serve.engine.client import Batch
from ridgeline.serve.http.errors import APIError, as_api_error, dumps, internal

T = TypeVar("T")
WIRE = "ridgeline.wire"  # among the extensions of a request's scope


DONE = b"data: [DONE]\n\n"
CLIENT_GONE = 499  # nginx's; nobody reads it


def event(value: Any, name: str | None = None) -> bytes:
    """One event that holds an object."""
    kind = b"" if name is None else b"event: " + name.encode() + b"\n"
    return kind + b"data: " + dumps(value) + b"\n\n"


class Envelope:
    """The events of one answer, which differ in their choices only. head: the fields that all begin with."""

    def __init__(self, head: Mapping[str, Any]) -> None:
        self._begin = b"data: " + dumps(head)[:-1] + b',"choices":['

    def event(self, choices: Sequence[Mapping[str, Any]], usage: Mapping[str, Any] | None = None) -> bytes:
        """One event."""
        used = b"" if usage is None else b',"usage":' + dumps(usage)
        return b"%s%s%s}\n\n" % (self._begin, dumps(choices)[1:], used)


class Wire(Protocol):
    """A request's connection, below HTTP's machinery: that is made for messages, each of which passes eight layers."""

    @property
    def paused(self) -> bool:
        """So much waits for the reader that nothing more should be written."""

    def write_chunk(self, data: bytes) -> None:
        """A piece of the body, to the socket before this returns, unless the reader is behind."""

    def listen(self, changed: Callable[[], None] | None) -> None:
        """`changed` is called when `paused` has changed."""


class Source(Protocol):
    """Where chunks come from, as service.Turn."""

    @property
    def committed(self) -> float: ...

    @property
    def waiting(self) -> bool: ...

    def check(self) -> None: ...

    def take(self) -> Batch: ...

    def listen(self, news: Callable[[], None]) -> None: ...

    def close(self) -> None: ...


class Events(Protocol):
    """An answer as events, all of it bytes; b"" where there is nothing to tell."""

    def begin(self) -> bytes:
        """What comes before all else."""

    def tell(self, batch: Batch) -> bytes:
        """What came. Raises APIError for an answer that failed."""

    def end(self) -> bytes:
        """The rest of an answer that is complete."""

    def failed(self, error: APIError) -> bytes:
        """The rest of one that is not."""


class EventStream(Response):
    """Writes what comes of a turn as soon as it comes, each time in one write. What the engine refuses is raised before
    the response starts. written: called with the seconds since the engine had it, after each write with tokens.

    A reader that is slow holds up its own events only: what it has not read waits in its own queue, until the
    connection's timeout ends it.
    """

    media_type = "text/event-stream"

    def __init__(self, turn: Source, events: Events, written: Callable[[float], None]) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self.headers["transfer-encoding"] = "chunked"  # as Wire.write_chunk writes
        self._turn, self._events, self._written = turn, events, written
        self._over = asyncio.get_running_loop().create_future()  # is all written? False: the reader is gone

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._wire: Wire = scope["extensions"][WIRE]
        gone = asyncio.create_task(_gone(receive))
        gone.add_done_callback(lambda _: self._end(False))
        try:
            await self._first(gone)
            self._turn.check()
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            self._begin()
            if await self._over:
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self._end(False)
            self._wire.listen(None)
            gone.cancel()
            await asyncio.gather(gone, return_exceptions=True)
            self._turn.close()

    async def _first(self, gone: asyncio.Task[None]) -> None:
        """Wait until there is something to tell, or nobody to tell it to."""
        come = asyncio.Event()
        gone.add_done_callback(lambda _: come.set())
        self._turn.listen(come.set)
        if self._turn.waiting:
            await come.wait()

    def _end(self, written: bool) -> None:
        if not self._over.done():
            self._over.set_result(written)

    def _begin(self) -> None:
        if data := self._events.begin():
            self._wire.write_chunk(data)
        self._wire.listen(self._advance)
        self._turn.listen(self._advance)
        self._advance()

    def _advance(self) -> None:
        """Write what has come."""
        if self._wire.paused or self._over.done():
            return
        data, tokens = b"", False
        try:
            while not self._turn.waiting and not self._over.done():
                if batch := self._turn.take():
                    data += self._events.tell(batch)
                    tokens = tokens or any(chunk.token_ids for _, chunk in batch)
                else:
                    data += self._events.end()
                    self._end(True)
        except Exception as e:  # the reader hears of it in a last event; a fault of ours is raised too
            told = as_api_error(e)
            data += self._events.failed(told or internal())
            self._end(True) if told is not None else self._over.set_exception(e)
        if data:
            self._wire.write_chunk(data)
            if tokens:
                self._written(time.perf_counter() - self._turn.committed)


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T | Response:
    """What `work` gives; it is cancelled if the client goes away first."""
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
