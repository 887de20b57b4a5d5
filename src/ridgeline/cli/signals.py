"""Stop a command on SIGINT (Ctrl-C) or SIGTERM: the first signal lets it clean up, the second one kills it."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

STOPPING = (signal.SIGINT, signal.SIGTERM)


class Interrupted(BaseException):
    """A signal stopped a command, which knows what became of its work. `str()` is that message, for one line."""


@contextmanager
def stop_signals() -> Iterator[list[int]]:
    """Raise KeyboardInterrupt in this block when one of the signals arrives. Yields a list that then holds the signal's
    number.

    A signal that was ignored at the start (nohup, a background job) stays ignored.
    """
    received: list[int] = []

    def stop(number: int, frame: FrameType | None) -> None:
        received.append(number)
        for each in changed:
            signal.signal(each, signal.SIG_DFL)  # a second signal kills the process
        raise KeyboardInterrupt

    changed = {number: old for number in STOPPING if (old := signal.getsignal(number)) not in (signal.SIG_IGN, None)}
    for number in changed:
        signal.signal(number, stop)
    try:
        yield received
    finally:
        for number, old in changed.items():
            signal.signal(number, old)
