"""Answer HTTP/1.0 clients. HTTP/1.0 has no chunks, so an answer of unknown length ends with its connection."""

from __future__ import annotations

from typing import Any

from starlette.types import Message
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle

from ridgeline.serve.http.wire import TransportWire


class PlainCycle:
    """Replaces the `send` of uvicorn's cycle, which sends every body of unknown length in chunks."""

    def __init__(self, cycle: RequestResponseCycle, wire: TransportWire) -> None:
        self._cycle, self._wire, self._send = cycle, wire, cycle.send
        self._plain = False

    @classmethod
    def take_over(cls, cycle: RequestResponseCycle, wire: TransportWire) -> None:
        """Replace the `send` of a cycle by this class."""
        cycle.send = cls(cycle, wire).send  # type: ignore[method-assign, assignment]

    async def send(self, message: Message) -> None:
        """Send an ASGI message. Answers with a known length are left to uvicorn."""
        names = [name.lower() for name, _ in message.get("headers", ())]
        if message["type"] == "http.response.start" and b"content-length" not in names:
            self._begin(message)
        elif self._plain:
            await self._write(message)
        else:
            await self._send(message)  # type: ignore[arg-type]

    def _begin(self, message: Message) -> None:
        cycle = self._cycle
        self._plain, self._wire.chunked = True, False
        cycle.response_started = True
        headers: list[tuple[bytes, bytes]] = [*cycle.default_headers, *message.get("headers", ())]
        lines = [name + b": " + value + b"\r\n" for name, value in headers if name.lower() != b"transfer-encoding"]
        cycle.transport.write(b"".join([STATUS_LINE[message["status"]], *lines, b"connection: close\r\n\r\n"]))

    async def _write(self, message: Any) -> None:
        cycle = self._cycle
        if cycle.flow.write_paused and not cycle.disconnected:
            await cycle.flow.drain()
        if cycle.disconnected or cycle.response_complete:
            return
        if cycle.scope["method"] != "HEAD":
            cycle.transport.write(message.get("body", b""))
        if not message.get("more_body", False):
            cycle.response_complete = True
            cycle.message_event.set()
            cycle.transport.close()
            cycle.on_response()
