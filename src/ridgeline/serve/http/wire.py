"""Write a stream of events directly to its connection."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class TransportWire:
    """sse.Wire over a transport. The transport's protocol calls `pause`."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._changed: Callable[[], None] | None = None
        self.paused = False
        self.chunked = True  # False for HTTP/1.0, which has no chunks
        self._kept, self._keeping = b"", False
        self._ended = False

    def pause(self, paused: bool) -> None:
        """Note that the transport's write buffer is too full, or no longer is."""
        self.paused = paused
        if self._changed is not None:
            self._changed()

    def listen(self, changed: Callable[[], None] | None) -> None:
        """Call `changed` whenever `paused` changes."""
        self._changed = changed

    def write_chunk(self, data: bytes) -> None:
        self.write(b"%x\r\n%b\r\n" % (len(data), data) if self.chunked else data)

    def keep(self) -> None:
        self._keeping = True

    def flush(self) -> None:
        self._keeping = False
        if self._kept:
            self.write(b"")

    def end(self) -> None:
        """Drop what is written from now on."""
        self._ended = True

    def write(self, data: bytes) -> None:
        """Write any bytes of an answer, after those that were kept."""
        data, self._kept = self._kept + data, b""
        if self._keeping:
            self._kept, self._keeping = data, False
        elif not (self._ended or self._transport.is_closing()):
            self._transport.write(data)
