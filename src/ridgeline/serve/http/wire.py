"""A connection as a stream of events sees it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class TransportWire:
    """sse.Wire over a transport, whose protocol says when it is paused."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._changed: Callable[[], None] | None = None
        self.paused = False
        self.chunked = True  # is the body framed in chunks? Not for HTTP/1.0

    def pause(self, paused: bool) -> None:
        """The transport holds more than it should, or no longer does."""
        self.paused = paused
        if self._changed is not None:
            self._changed()

    def listen(self, changed: Callable[[], None] | None) -> None:
        """As sse.Wire says, and so below."""
        self._changed = changed

    def write_chunk(self, data: bytes) -> None:
        if not self._transport.is_closing():
            self._transport.write(b"%x\r\n%b\r\n" % (len(data), data) if self.chunked else data)
