"""Accepts connections: as many as there are slots, and without a busy loop where the system has no files left.

asyncio's own server has no limit, and where a process has no files left it writes a traceback for each connection that
waits, several thousand times a second.
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
# Errors of one connection, which its client has ended already: the next one can be accepted at once.
_OF_ONE = frozenset({errno.ECONNABORTED, errno.EPROTO, errno.ECONNRESET})
_MANY_FILES = 10_240  # what macOS allows where it says that there is no limit

log = logging.getLogger(__name__)


class Acceptor:
    """Takes connections from a socket that listens, until it is closed. make: a protocol for a slot."""

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
        """Begin to accept."""
        self._listener.setblocking(False)
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Accept nothing more, and close the socket. May be called again."""
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(NotImplementedError):  # of Windows' loop
            asyncio.get_running_loop().remove_reader(self._listener)
        await asyncio.sleep(0)  # a connection that was accepted at this moment is seen, not lost
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
                self._errors.warning("connections cannot be accepted: %s; the server tries again", e.strerror or e)
                await asyncio.sleep(0.0 if e.errno in _OF_ONE else BACKOFF_SECONDS)
                continue
            if self._closed or (slot := self._connections.take()) is None:
                sock.close()
            else:
                task = loop.create_task(self._connect(sock, slot))
                self._starting.add(task)
                task.add_done_callback(self._starting.discard)
            await asyncio.sleep(0)  # a flood of connections does not hold up those that are open

    async def _connect(self, sock: socket.socket, slot: Slot) -> None:
        loop, seconds = asyncio.get_running_loop(), self._connections.timeouts.headers
        tls = {} if self._tls is None else {"ssl": self._tls, "ssl_handshake_timeout": seconds}
        try:
            await loop.connect_accepted_socket(lambda: self._make(slot), sock, **tls)  # type: ignore[arg-type]
        except OSError as e:  # no TLS, or none in time
            self._connections.ended["handshake"] += 1
            log.debug("a handshake failed: %s", e)
            slot.release()
        except BaseException:
            slot.release()
            raise


def raise_file_limit() -> int | None:
    """Raise the number of files that this process may open to what the system allows. The number; None: no limit."""
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
