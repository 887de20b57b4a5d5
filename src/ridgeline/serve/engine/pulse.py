"""The engine's signs of life: a thread sends them, so that a long step does not look like a process that hangs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from ridgeline.serve.engine.messages import Beat

BEAT_SECONDS = 0.5


class Pulse:
    """Sends a Beat twice a second, from `start` to `stop`. It says for how long the loop has been in one turn: a
    process that is stopped sends nothing, a loop that hangs is in a turn that does not end.
    """

    def __init__(self, send: Callable[[object], None]) -> None:
        self._send = send
        self._began: float | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ridgeline-pulse", daemon=True)

    def begin(self) -> None:
        """The loop begins a turn."""
        self._began = time.monotonic()

    def end(self) -> None:
        """The loop waits for messages."""
        self._began = None

    def start(self) -> None:
        """Begin to send."""
        self._thread.start()

    def stop(self) -> None:
        """Send nothing more."""
        self._over.set()
        self._thread.join(2 * BEAT_SECONDS)

    def _run(self) -> None:
        while not self._over.wait(BEAT_SECONDS):
            began = self._began
            try:
                self._send(Beat(0.0 if began is None else time.monotonic() - began))
            except OSError:  # the server is gone, which the loop finds too
                return
