"""Send the engine's heartbeats from a thread, so that a long step does not look like a process that hangs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from ridgeline.serve.engine.messages import Beat

BEAT_SECONDS = 0.5


class Pulse:
    """Sends a Beat twice a second, from `start` to `stop`.

    Each Beat says how long the loop has been in its current turn. So the HTTP process can tell a stopped process, which
    sends nothing, from a loop that hangs, whose turn does not end.
    """

    def __init__(self, send: Callable[[object], None]) -> None:
        self._send = send
        self._began: float | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ridgeline-pulse", daemon=True)

    def begin(self) -> None:
        """Note that the loop begins a turn."""
        self._began = time.monotonic()

    def end(self) -> None:
        """Note that the loop waits for messages."""
        self._began = None

    def start(self) -> None:
        """Start sending."""
        self._thread.start()

    def stop(self) -> None:
        """Stop sending."""
        self._over.set()
        self._thread.join(2 * BEAT_SECONDS)

    def _run(self) -> None:
        while not self._over.wait(BEAT_SECONDS):
            began = self._began
            try:
                self._send(Beat(0.0 if began is None else time.monotonic() - began))
            except OSError:  # the server has ended; the loop notices it too
                return
