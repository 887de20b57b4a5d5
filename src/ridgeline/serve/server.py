"""Runs the application: the engine first, then HTTP, until a signal; then what is open may end."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from ridgeline.errors import RequestError
from ridgeline.serve.app import build_app
from ridgeline.serve.client import EngineClient
from ridgeline.serve.errors import APIError, dumps
from ridgeline.serve.messages import Loading
from ridgeline.serve.options import ServeOptions
from ridgeline.serve.service import Service
from ridgeline.serve.settle import settle
from ridgeline.serve.sse import WIRE
from ridgeline.serve.wire import TransportWire

BACKLOG = 2048
MAX_HEAD_BYTES = 1 << 16
TOO_LONG = f"the headers are longer than {MAX_HEAD_BYTES} bytes"


class _Protocol(HttpToolsProtocol):
    """What is no HTTP is told so in the shape of all other errors; headers have an end; streams are written straight to
    the connection.
    """

    _open_bytes: int | None = 0  # of a request whose headers are not complete; None: they are
    _header_bytes = 0  # names and values of headers that are complete
    _wire: TransportWire

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wire = TransportWire(transport)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._wire.pause(True)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._wire.pause(False)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._open_bytes is not None:
            self._open_bytes += len(data)
            if self._open_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
                self.send_400_response(TOO_LONG)

    def on_message_begin(self) -> None:
        self._open_bytes, self._header_bytes = 0, 0
        super().on_message_begin()
        self.scope["extensions"] = {WIRE: self._wire}  # type: ignore[dict-item]

    def on_header(self, name: bytes, value: bytes) -> None:
        self._header_bytes += len(name) + len(value)
        if self._header_bytes > MAX_HEAD_BYTES:
            raise ValueError(TOO_LONG)  # which ends in a call of send_400_response
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._open_bytes = None
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        text = TOO_LONG if self._header_bytes > MAX_HEAD_BYTES else msg
        body = dumps(APIError(400, text, code="invalid_http").body())
        head = f"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
        self.transport.write(head.encode() + b"connection: close\r\n\r\n" + body)
        self.transport.close()


class _Server(uvicorn.Server):
    """Ends in good order at the first signal, and at once at the second."""

    def __init__(self, config: uvicorn.Config, on_drain: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_drain = on_drain

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        numbers = (signal.SIGINT, signal.SIGTERM)
        old = {number: signal.signal(number, self.handle_exit) for number in numbers}
        try:
            yield
        finally:
            for number, handler in old.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            self.force_exit = True
        self.should_exit = True
        self._on_drain()


async def serve(
    model: str,
    llm_options: Mapping[str, Any],
    options: ServeOptions,
    *,
    on_loading: Callable[[Loading], None],
    on_ready: Callable[[Service, str], None],
) -> None:
    """Serve a model until a signal ends it.

    on_ready: called with the service and its URL, once requests are welcome. Raises RidgelineError for a model that
    cannot be loaded, and for an address that cannot be had.
    """
    listener = _bind(options)  # before the model is loaded: an address that is taken is told at once
    client = EngineClient(model, llm_options, on_loading)
    try:
        service = Service(client, await client.start(), options)
        config = uvicorn.Config(
            build_app(service), http=_Protocol, ws="none", lifespan="off", log_config=None, access_log=False,
            server_header=False, timeout_graceful_shutdown=options.shutdown_timeout, ssl_keyfile=options.ssl_keyfile,
            ssl_certfile=options.ssl_certfile,
        )  # fmt: skip

        def drain() -> None:
            service.draining = True

        server = _Server(config, drain)
        settle()
        listener.listen(BACKLOG)  # who comes after `on_ready` is not refused, though a moment early
        scheme = "https" if options.ssl_certfile else "http"
        host = f"[{options.host}]" if ":" in options.host else options.host
        on_ready(service, f"{scheme}://{host}:{listener.getsockname()[1]}")
        await server.serve([listener])
        if service.traces is not None:
            await asyncio.to_thread(service.traces.close)
    finally:
        await client.close()
        listener.close()


def _bind(options: ServeOptions) -> socket.socket:
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    listener = socket.socket(family)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((options.host, options.port))
    except OSError as e:
        listener.close()
        why = e.strerror or e
        raise RequestError(f"{options.host}:{options.port} cannot be had: {why}; choose another --port") from None
    listener.set_inheritable(False)
    return listener


def run(*args: Any, **kwargs: Any) -> None:
    """`serve` in an event loop of its own."""
    asyncio.run(serve(*args, **kwargs))
