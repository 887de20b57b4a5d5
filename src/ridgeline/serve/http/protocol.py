"""HTTP/1.1 and HTTP/1.0 on one connection: uvicorn's protocol with timeouts on everything that a client can delay."""

from __future__ import annotations

import asyncio
import time
from typing import Any, Literal

from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from ridgeline.serve.http.connections import RESERVED_PATHS, Slot
from ridgeline.serve.http.errors import APIError, dumps, send_error
from ridgeline.serve.http.plain import PlainCycle
from ridgeline.serve.http.sse import WIRE
from ridgeline.serve.http.wire import TransportWire

MAX_HEAD_BYTES = 1 << 16
TOO_LONG = f"the headers are longer than {MAX_HEAD_BYTES} bytes"
BODY_BYTES_PER_SECOND = 1 << 14  # a body that arrives at this average speed or faster never times out
LINGER_SECONDS = 2.0  # after an early answer, to read and drop the rest of the client's body
PROBE_SECONDS = 0.05  # before the first probe of a half-closed connection; the time doubles with each further probe

# The event that a connection waits for. None: it waits for the server.
Phase = Literal["headers", "body", "idle", "write", "linger"] | None
_WAITING: tuple[Phase, ...] = ("headers", "idle", "linger")  # no request is open


class Protocol(HttpToolsProtocol):
    """uvicorn's protocol with these additions: timeouts, a limit on the size of headers, errors as JSON, streams that
    are written directly to the connection, answers to clients that have closed their sending side, and slots that are
    reserved for RESERVED_PATHS.

    A body may take `Timeouts.body` seconds, plus the received bytes divided by BODY_BYTES_PER_SECOND.
    """

    _wire: TransportWire

    def __init__(self, *args: Any, slot: Slot, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._slot, self._limits = slot, slot.connections.timeouts
        self._reading: Literal["headers", "body"] | None = "headers"  # the part of a request that is incomplete
        self._open_bytes = 0  # received since the last complete headers
        self._header_bytes = 0  # names and values of headers that are complete
        self._body_bytes = 0
        self._phase: Phase = None
        self._since = 0.0  # when the phase began (time.monotonic)
        self._timer: asyncio.TimerHandle | None = None
        self._probe: asyncio.TimerHandle | None = None
        self._half_closed = self._lingering = self._behind = self._lost = False

    # ---- the connection ---------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wire = TransportWire(transport)
        self._slot.end = transport.abort
        if self._slot.reserved:
            self.app = Reserved(self.app)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost = True
        for timer in (self._timer, self._probe):
            if timer is not None:
                timer.cancel()
        self._slot.release()
        super().connection_lost(exc)

    def eof_received(self) -> bool:  # type: ignore[override]
        """Answer a client that closes its sending side after a request. Over TLS, asyncio closes the connection."""
        if self._reading == "body" or self.scheme == "https" or not self._answering:
            return False
        if not self._half_closed:
            self._half_closed = True
            self._seek(PROBE_SECONDS)
        return True

    def pause_writing(self) -> None:
        super().pause_writing()
        self._behind = True
        self._watch()
        self._wire.pause(True)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._behind = False
        self._watch()
        self._wire.pause(False)

    def shutdown(self) -> None:
        if not self.transport.is_closing():  # a TLS transport breaks when it is closed twice
            super().shutdown()
            self._watch()

    # ---- requests ---------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        if self._lingering:
            return
        if self._reading is None and not self._answering:  # any byte here begins a request
            self._reading = "headers"
        began = self._reading == "headers"
        super().data_received(data)
        if self._reading == "headers":
            self._open_bytes += len(data) if began else 1
        if self._reading == "headers" and self._open_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response(TOO_LONG)
        self._watch()

    def on_message_begin(self) -> None:
        self._reading, self._header_bytes = "headers", 0
        super().on_message_begin()
        self.scope["extensions"] = {WIRE: self._wire}  # type: ignore[dict-item]

    def on_header(self, name: bytes, value: bytes) -> None:
        self._header_bytes += len(name) + len(value)
        if self._header_bytes > MAX_HEAD_BYTES:
            raise ValueError(TOO_LONG)  # the parser then calls send_400_response
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._reading, self._open_bytes, self._body_bytes = "body", 0, 0
        super().on_headers_complete()
        self.cycle.transport = _Ending(self)  # type: ignore[assignment]
        if self._slot.reserved:
            self.cycle.keep_alive = False
        if self.scope["http_version"] == "1.0":
            PlainCycle.take_over(self.cycle, self._wire)

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._reading = None
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._unset_keepalive_if_required()  # replaced by _watch: any byte would end uvicorn's keep-alive timer
        if self._half_closed and not self._answering and not self.transport.is_closing():
            self.transport.close()
        self._watch()

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, TOO_LONG if self._header_bytes > MAX_HEAD_BYTES else msg, "invalid_http")

    def finish(self) -> None:
        """Close the connection after an answer. If the client is still sending, read and drop its bytes for a while.

        Closing at once would reset the connection, and the client might not see the answer.
        """
        if self.transport.is_closing() or self._lingering:
            return
        if self._reading is None or self._half_closed or not self.transport.can_write_eof():
            self.transport.close()
            return
        self._lingering = True
        self._wire.end()
        self.transport.write_eof()
        self._watch()

    @property
    def _answering(self) -> bool:
        """Return whether a request does not have its whole answer yet."""
        return bool(self.pipeline) or (self.cycle is not None and not self.cycle.response_complete)

    def _refuse(self, status: int, text: str, code: str) -> None:
        body = dumps(APIError(status, text, code=code).body())
        reason = {400: "Bad Request", 408: "Request Timeout"}[status]
        head = f"HTTP/1.1 {status} {reason}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
        self.transport.write(head.encode() + b"connection: close\r\n\r\n" + body)
        if self._answering:  # the application is told that the client is gone, and writes nothing after this answer
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.finish()
        self._watch()

    # ---- time -------------------------------------------------------------------------------------------------

    def _now_phase(self) -> Phase:
        if self._behind or (self.transport.is_closing() and self.transport.get_write_buffer_size()):
            return "write"
        if self._lingering:
            return "linger"
        if self._reading == "body":
            return "body"
        if self._answering:
            return None
        return "headers" if self._reading == "headers" else "idle"

    def _watch(self) -> None:
        """Start the timeout of a new phase."""
        if self._lost or (phase := self._now_phase()) == self._phase:
            return
        self._phase, self._since = phase, time.monotonic()
        (self._slot.wait if phase in _WAITING else self._slot.work)()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if phase is not None:
            self._timer = self.loop.call_later(self._seconds(phase), self._expire)

    def _seconds(self, phase: Phase) -> float:
        limits = self._limits
        if phase == "body":
            return limits.body + self._body_bytes / BODY_BYTES_PER_SECOND
        return {
            "headers": limits.headers, "idle": limits.keep_alive, "write": limits.write, "linger": LINGER_SECONDS,
        }[str(phase)]  # fmt: skip

    def _expire(self) -> None:
        phase, left = self._phase, self._since + self._seconds(self._phase) - time.monotonic()
        if phase == "body" and self.flow.read_paused:  # the server does not read, so it is not the client's fault
            left = self._limits.body
        if left > 0.001:
            self._timer = self.loop.call_later(left, self._expire)
            return
        if phase == "linger":
            self.transport.abort()
            return
        self._slot.connections.ended[str(phase)] += 1
        if phase == "write":
            self.transport.abort()
        elif phase == "headers" and self._open_bytes:
            self._refuse(408, f"the headers took longer than {self._limits.headers:g} s", "timeout")
        elif phase == "body" and not self.cycle.response_started:
            self._refuse(408, f"the body took longer than {self._seconds(phase):.3g} s, at less than "
                         f"{BODY_BYTES_PER_SECOND} bytes a second", "timeout")  # fmt: skip
        else:
            self.transport.close()

    def _seek(self, wait: float) -> None:
        """Find out whether a client that has closed its sending side still reads.

        If the client has closed the whole connection, its system answers our bytes with a reset, and our next write
        fails. The bytes are interim responses, which HTTP/1.1 allows in any number before an answer.
        """
        if not self._answering or self._lingering or self.transport.is_closing():
            return
        if not self.cycle.response_started and self.cycle.scope["http_version"] == "1.1" and not self.pipeline:
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self._probe = self.loop.call_later(wait, self._seek, 2 * wait)


class _Ending:
    """The transport that a request's cycle writes to. Closing it calls Protocol.finish."""

    def __init__(self, protocol: Protocol) -> None:
        self._protocol = protocol
        self.write, self.is_closing = protocol._wire.write, protocol.transport.is_closing

    def close(self) -> None:
        """Close the connection as Protocol.finish does."""
        self._protocol.finish()


class Reserved:
    """The application on a connection beyond the limit: only RESERVED_PATHS are answered."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] in RESERVED_PATHS:
            await self._app(scope, receive, send)
            return
        error = APIError(
            503, "all connections of this server are in use (--max-connections); try again in 1 s",
            code="too_many_connections", retry_after=1,
        )  # fmt: skip
        await send_error(error, send)
