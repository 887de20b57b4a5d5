"""The connections of the HTTP process: how many there may be, which one makes room, and why each was ended."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

# Connections beyond the limit that are still accepted, so that RESERVED_PATHS can be asked of a server that is full.
RESERVE = 16
RESERVED_PATHS = frozenset({"/health", "/ready", "/metrics"})
OTHER_FILES = 64  # files and pipes of this process that are not connections
ROOM_SECONDS = 1.0  # a connection that has waited for less does not make room for another one
LOG_SECONDS = 60.0
# Why the server ends a connection: a timeout of its client, a TLS handshake that failed, or to make room.
REASONS = ("headers", "body", "idle", "write", "handshake", "room")


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Seconds that a connection may take.

    headers: from its start, or from the first byte of a later request, to the end of the headers. body: from there to
    the end of the body; what has come extends it (see Protocol). keep_alive: between an answer and the next request.
    write: for the client to catch up once it is behind with reading.
    """

    headers: float = 10.0
    body: float = 30.0
    keep_alive: float = 75.0
    write: float = 60.0


class Slot:
    """The place of one connection. reserved: it may ask for RESERVED_PATHS only."""

    def __init__(self, connections: Connections, *, reserved: bool) -> None:
        self.connections, self.reserved = connections, reserved
        self.end: Callable[[], None] | None = None  # ends the connection, once there is a protocol

    def wait(self) -> None:
        """The connection has no open request from now on, so it may be ended to make room."""
        self.connections.waiting(self, True)

    def work(self) -> None:
        """The connection has a request."""
        self.connections.waiting(self, False)

    def release(self) -> None:
        """The connection is closed. May be called again."""
        self.connections.release(self)


class Connections:
    """Counts connections and gives each a slot. Belongs to one event loop."""

    def __init__(self, limit: int, timeouts: Timeouts, reserve: int = RESERVE) -> None:
        """limit: connections with requests of all kinds. reserve: further ones, for RESERVED_PATHS."""
        self.limit, self.timeouts, self.reserve = limit, timeouts, reserve
        self.accepted = self.refused = self.accept_errors = 0
        self.ended: Counter[str] = Counter()  # connections that the server ended, by reason
        self._open: set[Slot] = set()
        self._reserved: set[Slot] = set()
        self._waiting: dict[Slot, float] = {}  # since when (time.monotonic), the longest first
        self._full = SeldomLog(logging.getLogger(__name__))

    def __len__(self) -> int:
        """Connections that are open."""
        return len(self._open) + len(self._reserved)

    def take(self) -> Slot | None:
        """A slot for a new connection; a reserved one if all others are in use; None if those are in use too.

        If all are in use, the connection that has waited longest without a request is ended to make room.
        """
        if len(self._open) >= self.limit:
            self._make_room(reserved=False, waited=ROOM_SECONDS)
        reserved = len(self._open) >= self.limit
        if reserved:
            self._full.warning(
                "all %d connections are in use (--max-connections): only /health, /ready and /metrics are answered on "
                "new ones", self.limit,
            )  # fmt: skip
            if len(self._reserved) >= self.reserve:
                self._make_room(reserved=True, waited=0.0)
            if len(self._reserved) >= self.reserve:
                self.refused += 1
                return None
        slot = Slot(self, reserved=reserved)
        (self._reserved if reserved else self._open).add(slot)
        self.accepted += 1
        return slot

    def release(self, slot: Slot) -> None:
        """As Slot.release."""
        self._open.discard(slot)
        self._reserved.discard(slot)
        self._waiting.pop(slot, None)

    def waiting(self, slot: Slot, now: bool) -> None:
        """As Slot.wait and Slot.work."""
        self._waiting.pop(slot, None)
        if now:
            self._waiting[slot] = time.monotonic()

    def _make_room(self, *, reserved: bool, waited: float) -> None:
        found = next((item for item in self._waiting.items() if item[0].reserved == reserved), None)
        if found is None or time.monotonic() - found[1] < waited:
            return
        slot, _ = found
        self.release(slot)
        self.ended["room"] += 1
        if slot.end is not None:
            slot.end()


class SeldomLog:
    """Warnings that can come thousands of times a second: one line a minute, which counts the others."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._last = -LOG_SECONDS
        self._left_out = 0

    def warning(self, text: str, *args: object) -> None:
        """Write the line, or count it."""
        now = time.monotonic()
        if now - self._last < LOG_SECONDS:
            self._left_out += 1
            return
        more = f" ({self._left_out} more such events since the last line)" if self._left_out else ""
        self._last, self._left_out = now, 0
        self._log.warning(text + "%s", *args, more)


def fitting(asked: int, files: int | None) -> int:
    """The connections that a limit of open files allows, at most `asked`. files: None if there is no limit."""
    return asked if files is None else max(1, min(asked, files - RESERVE - OTHER_FILES))
