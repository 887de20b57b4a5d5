"""Server-sent events: a response that is written as its events come, and that ends when its reader goes away."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ridgeline.serve.errors import dumps

T = TypeVar("T")
# A reader that takes nothing for so long holds a whole answer in memory that no limit counts any more.
PATIENCE_SECONDS = 60.0


class Notice(bytes):
    """An event without tokens; joined to others, it is bytes like them."""


DONE = Notice(b"data: [DONE]\n\n")
CLIENT_GONE = 499  # nginx's; nobody reads it


def event(value: Any, name: str | None = None) -> bytes:
    """One event that holds an object."""
    kind = b"" if name is None else b"event: " + name.encode() + b"\n"
    return Notice(kind + b"data: " + dumps(value) + b"\n\n")


class Envelope:
    """The events of one answer, which differ in their choices only. head: the fields that all begin with."""

    def __init__(self, head: Mapping[str, Any]) -> None:
        self._begin = b"data: " + dumps(head)[:-1] + b',"choices":['

    def event(self, choices: Sequence[Mapping[str, Any]], usage: Mapping[str, Any] | None = None) -> bytes:
        """One event."""
        used = b"" if usage is None else b',"usage":' + dumps(usage)
        data = b"%s%s%s}\n\n" % (self._begin, dumps(choices)[1:], used)
        return data if choices else Notice(data)


class EventStream(Response):
    """Writes what `events` yields, one write each. written: called after each that has tokens. close: called when
    all is written, or nobody reads any more.

    A reader that is slow holds up its own events only: what it has not read waits in its own queue. One that takes
    nothing for `patience_s` counts as gone.
    """

    media_type = "text/event-stream"

    def __init__(
        self, events: AsyncIterator[bytes], written: Callable[[], None], close: Callable[[], None],
        patience_s: float = PATIENCE_SECONDS,
    ) -> None:  # fmt: skip
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events, self._written, self._close, self._patience_s = events, written, close, patience_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        write = asyncio.create_task(self._write(send))
        gone = asyncio.create_task(_gone(receive))
        try:
            await asyncio.wait((write, gone), return_when=asyncio.FIRST_COMPLETED)
            if write.done():
                write.result()
        finally:
            write.cancel()
            gone.cancel()
            await asyncio.gather(write, gone, return_exceptions=True)
            self._close()

    async def _write(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for data in self._events:
            try:
                async with asyncio.timeout(self._patience_s):
                    await send({"type": "http.response.body", "body": data, "more_body": True})
            except TimeoutError:
                logging.getLogger(__name__).warning("a reader took nothing for %g s: its answer ends", self._patience_s)
                return
            if not isinstance(data, Notice):
                self._written()
        await send({"type": "http.response.body", "body": b"", "more_body": False})


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
