"""Limit the number of connections, and count why the server ended them."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

# Connections beyond the limit that are still accepted, so that a full server still answers RESERVED_PATHS.
RESERVE = 16
RESERVED_PATHS = frozenset({"/health", "/ready", "/metrics"})
OTHER_FILES = 64  # open files and pipes of this process that are not connections
ROOM_SECONDS = 1.0  # an idle connection is only closed for a new one after this time
LOG_SECONDS = 60.0
# Reasons for which the server ends a connection: four timeouts of the client, a failed TLS handshake, and "room": an
# idle connection is closed for a new one.
REASONS = ("headers", "body", "idle", "write", "handshake", "room")


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Timeouts of a connection, in seconds.

    headers: from the connection's start, or from the first byte of a later request, to the end of the headers. body:
    from there to the end of the body; received bytes extend it (see Protocol). keep_alive: between an answer and the
    next request. write: for a client that is too slow at reading to catch up.
    """

    headers: float = 10.0
    body: float = 30.0
    keep_alive: float = 75.0
    write: float = 60.0


class Slot:
    """The slot of one connection. reserved: True if it may only request RESERVED_PATHS."""

    def __init__(self, connections: Connections, *, reserved: bool) -> None:
        self.connections, self.reserved = connections, reserved
        self.end: Callable[[], None] | None = None  # closes the connection; None until it has a protocol

    def wait(self) -> None:
        """Note that the connection has no open request, so it may be closed for a new connection."""
        self.connections.waiting(self, True)

    def work(self) -> None:
        """Note that the connection has a request."""
        self.connections.waiting(self, False)

    def release(self) -> None:
        """Note that the connection is closed. May be called again."""
        self.connections.release(self)


class Connections:
    """Counts connections and gives each a slot. Its methods must run in one event loop."""

    def __init__(self, limit: int, timeouts: Timeouts, reserve: int = RESERVE) -> None:
        """limit: number of connections for any request. reserve: number of further connections for RESERVED_PATHS."""
        self.limit, self.timeouts, self.reserve = limit, timeouts, reserve
        self.accepted = self.refused = self.accept_errors = 0
        self.ended: Counter[str] = Counter()  # connections that the server ended, by reason
        self._open: set[Slot] = set()
        self._reserved: set[Slot] = set()
        self._waiting: dict[Slot, float] = {}  # idle slots -> since when (time.monotonic), oldest first
        self._full = SeldomLog(logging.getLogger(__name__))

    def __len__(self) -> int:
        """Return the number of open connections."""
        return len(self._open) + len(self._reserved)

    def take(self) -> Slot | None:
        """Return a slot for a new connection.

        If all slots are in use, the connection that has been idle longest is closed for the new one. Otherwise the new
        connection gets a reserved slot, or None if these are all in use too.
        """
        if len(self._open) >= self.limit:
            self._make_room(reserved=False, waited=ROOM_SECONDS)
        reserved = len(self._open) >= self.limit
        if reserved:
            self._full.warning(
                "all %d connections are in use (--max-connections); new ones only get answers from /health, /ready and "
                "/metrics", self.limit,
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
        """Do as Slot.release."""
        self._open.discard(slot)
        self._reserved.discard(slot)
        self._waiting.pop(slot, None)

    def waiting(self, slot: Slot, now: bool) -> None:
        """Do as Slot.wait and Slot.work."""
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
    """Logs a frequent warning once a minute, with the number of warnings that were left out."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._last = -LOG_SECONDS
        self._left_out = 0

    def warning(self, text: str, *args: object) -> None:
        """Log the warning, or only count it."""
        now = time.monotonic()
        if now - self._last < LOG_SECONDS:
            self._left_out += 1
            return
        more = f" ({self._left_out} more such events since the last line)" if self._left_out else ""
        self._last, self._left_out = now, 0
        self._log.warning(text + "%s", *args, more)


def fitting(wanted: int, files: int | None) -> int:
    """Return how many of the `wanted` connections fit a limit of open files. files: None means no limit."""
    return wanted if files is None else max(1, min(wanted, files - RESERVE - OTHER_FILES))
