"""Run the server: start the engine, then accept requests until a signal, then let running requests finish."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from types import FrameType
from typing import Any

import uvicorn

from ridgeline.errors import RequestError
from ridgeline.serve.app import build_app
from ridgeline.serve.draft_log import DraftLog
from ridgeline.serve.engine.client import EngineClient
from ridgeline.serve.engine.handle import EngineHandle
from ridgeline.serve.engine.messages import Loading
from ridgeline.serve.engine.settle import settle
from ridgeline.serve.engine.watch import Patience
from ridgeline.serve.http.accept import Acceptor, raise_file_limit
from ridgeline.serve.http.connections import Connections, Slot, fitting
from ridgeline.serve.http.protocol import Protocol
from ridgeline.serve.options import ServeOptions
from ridgeline.serve.service import Service

BACKLOG = 2048
MAX_PORT = 65_535
log = logging.getLogger(__name__)

# The model, arguments of LLM, a function that gets the progress of loading, and limits on engines that hang.
OpenEngine = Callable[[str, Mapping[str, Any], Callable[[Loading], None], Patience], EngineHandle]
CUT_SECONDS = 2.0  # to send the last event of requests that are ended by --shutdown-timeout
TICK_SECONDS = 0.05


class HTTPServer(uvicorn.Server):
    """uvicorn's server with a limit on connections. The first signal lets requests finish, the second stops at once."""

    def __init__(
        self, config: uvicorn.Config, listener: socket.socket, connections: Connections,
        on_drain: Callable[[], None], on_cut: Callable[[], None],
    ) -> None:  # fmt: skip
        """on_drain: called at the first signal. on_cut: called when `timeout_graceful_shutdown` is over; it must end
        all open requests.
        """
        super().__init__(config)
        self._listener, self._connections = listener, connections
        self._on_drain, self._on_cut = on_drain, on_cut

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

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._acceptor = Acceptor(self._listener, self._connections, self._protocol, self.config.ssl)
        self._acceptor.start()
        self.started = True

    def _protocol(self, slot: Slot) -> Protocol:
        return Protocol(config=self.config, server_state=self.server_state, app_state={}, slot=slot)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop accepting and let running requests finish. After the timeout, streams end with an error event."""
        await self._acceptor.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        if await self._all_ended(self.config.timeout_graceful_shutdown):
            return
        self._on_cut()
        await self._all_ended(CUT_SECONDS)
        for connection in list(self.server_state.connections):
            connection.transport.abort()
        await asyncio.sleep(TICK_SECONDS)  # lets sockets close and requests notice that their client is gone
        for task in list(self.server_state.tasks):
            task.cancel()
        await asyncio.gather(*self.server_state.tasks, return_exceptions=True)

    async def _all_ended(self, seconds: float | None) -> bool:
        """Wait until no request is open. Return False if the time is over or a second signal arrived."""
        end = time.monotonic() + (seconds or 0)
        while self.server_state.connections or self.server_state.tasks:
            if self.force_exit or time.monotonic() > end:
                return False
            await asyncio.sleep(TICK_SECONDS)
        return True


async def serve(
    model: str,
    llm_options: Mapping[str, Any],
    options: ServeOptions,
    *,
    on_loading: Callable[[Loading], None],
    on_ready: Callable[[Service, str], None],
    on_bound: Callable[[str], None] = lambda url: None,
    open_engine: OpenEngine = EngineClient,
) -> None:
    """Serve a model until a signal ends it.

    on_loading: called with the progress of loading. open_engine: returns what answers requests. on_bound: called with
    the URL before the model is loaded. on_ready: called with the service and its URL once requests are accepted. Raises
    RidgelineError for a model that cannot be loaded and for an address that is in use.
    """
    listener = _bind(options)  # before the model is loaded, so that an address in use is reported at once
    url = _url(options, listener)
    on_bound(url)
    connections = _connections(options)
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(listener.close)
        service = await stack.enter_async_context(
            opened(model, llm_options, options, open_engine, on_loading, connections)
        )
        client = service.client
        config = uvicorn.Config(
            build_app(service), http=Protocol, ws="none", lifespan="off", log_config=None, access_log=False,
            server_header=False, timeout_graceful_shutdown=options.shutdown_timeout, ssl_keyfile=options.ssl_keyfile,
            ssl_certfile=options.ssl_certfile,
        )  # fmt: skip

        def drain() -> None:
            service.draining = True

        server = HTTPServer(config, listener, connections, drain, lambda: client.end_all("the server is stopping"))
        settle()
        listener.listen(BACKLOG)  # before `on_ready`, so that no client that connects right after it is refused
        on_ready(service, url)
        drafts = DraftLog(client)
        logs = asyncio.create_task(drafts.run())
        try:
            await server.serve()
        finally:
            logs.cancel()
        await drafts.once()


@contextlib.asynccontextmanager
async def opened(
    model: str, llm_options: Mapping[str, Any], options: ServeOptions, open_engine: OpenEngine,
    on_loading: Callable[[Loading], None], connections: Connections | None = None,
) -> AsyncIterator[Service]:  # fmt: skip
    """Load a model, and end its engines at the end. Raises RidgelineError for a model that cannot be loaded."""
    client = open_engine(model, llm_options, on_loading, options.patience)
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(client.close)
        service = Service(client, await client.start(), options, connections)
        stack.push_async_callback(asyncio.to_thread, service.helpers.close)
        if service.traces is not None:
            stack.push_async_callback(asyncio.to_thread, service.traces.close)
        yield service


def _connections(options: ServeOptions) -> Connections:
    """Return the connections of the server: --max-connections, or fewer if the limit of open files is lower."""
    limit = fitting(options.max_connections, files := raise_file_limit())
    if limit < options.max_connections:
        log.warning(
            "--max-connections is %d, but this process may open only %s files (ulimit -n); the limit is now %d",
            options.max_connections, files, limit,
        )  # fmt: skip
    return Connections(limit, options.timeouts)


def _url(options: ServeOptions, listener: socket.socket) -> str:
    """Return the URL of the server."""
    scheme = "https" if options.ssl_certfile else "http"
    host = f"[{options.host}]" if ":" in options.host else options.host
    return f"{scheme}://{host}:{listener.getsockname()[1]}"


def _bind(options: ServeOptions) -> socket.socket:
    """Return a socket bound to the address. Raises RequestError with the address, the reason and the remedy."""
    host, port = options.host, options.port
    if not 0 <= port <= MAX_PORT:
        raise RequestError(f"--port is {port}; it must be 0 (any free port) to {MAX_PORT}")
    # asyncio turns off Nagle's algorithm, which delays small writes by up to 40 ms, if the protocol is named.
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except (OSError, UnicodeError) as e:  # UnicodeError: a name that IDNA cannot encode
        listener.close()
        raise RequestError(f"cannot listen on {host:.100} port {port}: {_why(e)}") from None
    listener.set_inheritable(False)
    return listener


def _why(error: OSError | UnicodeError) -> str:
    """Return why an address cannot be used, and the remedy."""
    if isinstance(error, socket.gaierror):
        return "unknown host name; set --host to an address of this machine"
    if not isinstance(error, OSError):
        return "invalid host name; set --host to an address of this machine"
    what = error.strerror or str(error)
    if error.errno == errno.EADDRINUSE:
        return f"{what}; another process uses the port; choose another --port, or 0 for a free one"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"{what}; --host must be an address of this machine, 127.0.0.1 or 0.0.0.0"
    if error.errno in (errno.EACCES, errno.EPERM):
        return f"{what}; ports below 1024 are often reserved: choose another --port"
    return f"{what}; choose another --host or --port"


def run(*args: Any, **kwargs: Any) -> None:
    """Run `serve` in a new event loop."""
    asyncio.run(serve(*args, **kwargs))
