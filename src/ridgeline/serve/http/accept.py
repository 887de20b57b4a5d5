"""Accept connections within a limit.

asyncio's own server has no limit. When the process has no free file descriptors, it logs a traceback for each waiting
connection, thousands of times a second; this acceptor waits and logs one line a minute.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
import ssl
from collections.abc import Callable

from ridgeline.serve.http.connections import Connections, SeldomLog, Slot

BACKOFF_SECONDS = 0.1  # after an error, before the next attempt
# Errors of a single connection that its client has already ended. The next one can be accepted at once.
_ONE_CONNECTION = frozenset({errno.ECONNABORTED, errno.EPROTO, errno.ECONNRESET})
_MANY_FILES = 10_240  # the real limit of macOS when it reports no limit

log = logging.getLogger(__name__)


class Acceptor:
    """Accepts connections from a listening socket until it is closed. make: makes the protocol for a slot."""

    def __init__(
        self, listener: socket.socket, connections: Connections, make: Callable[[Slot], asyncio.Protocol],
        tls: ssl.SSLContext | None = None,
    ) -> None:  # fmt: skip
        self._listener, self._connections, self._make, self._tls = listener, connections, make, tls
        self._errors = SeldomLog(log)
        self._starting: set[asyncio.Task[None]] = set()
        self._task: asyncio.Task[None] | None = None
        self._closed = False

    def start(self) -> None:
        """Start accepting."""
        self._listener.setblocking(False)
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Stop accepting and close the socket. May be called again."""
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(NotImplementedError):  # Windows' event loop
            asyncio.get_running_loop().remove_reader(self._listener)
        await asyncio.sleep(0)  # lets `_run` handle a connection that was accepted at this moment
        tasks = [*self._starting, *([] if self._task is None else [self._task])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._listener.close()

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while not self._closed:
            try:
                sock, _ = await loop.sock_accept(self._listener)
            except OSError as e:
                self._connections.accept_errors += 1
                self._errors.warning("cannot accept connections: %s; the server tries again", e.strerror or e)
                await asyncio.sleep(0.0 if e.errno in _ONE_CONNECTION else BACKOFF_SECONDS)
                continue
            if self._closed or (slot := self._connections.take()) is None:
                sock.close()
            else:
                task = loop.create_task(self._connect(sock, slot))
                self._starting.add(task)
                task.add_done_callback(self._starting.discard)
            await asyncio.sleep(0)  # lets open connections run during a flood of new ones

    async def _connect(self, sock: socket.socket, slot: Slot) -> None:
        loop, seconds = asyncio.get_running_loop(), self._connections.timeouts.headers
        tls = {} if self._tls is None else {"ssl": self._tls, "ssl_handshake_timeout": seconds}
        try:
            await loop.connect_accepted_socket(lambda: self._make(slot), sock, **tls)  # type: ignore[arg-type]
        except OSError as e:  # the TLS handshake failed or took too long
            self._connections.ended["handshake"] += 1
            log.debug("a TLS handshake failed: %s", e)
            slot.release()
        except BaseException:
            slot.release()
            raise


def raise_file_limit() -> int | None:
    """Raise the limit of open files to what the system allows. Return the limit, or None if there is none."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return None
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for wanted in (hard, max(soft, _MANY_FILES)):
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            break
        except (ValueError, OSError):
            continue
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if soft == resource.RLIM_INFINITY else soft
