"""What a signal does to a command: SIGINT (Ctrl-C) and SIGTERM end it in good order, the second one at once."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

STOPPING = (signal.SIGINT, signal.SIGTERM)


class Interrupted(BaseException):
    """A command was cut short and has said what became of its work: `str()`, to be shown on one line."""


@contextmanager
def stop_signals() -> Iterator[list[int]]:
    """Inside, either signal raises KeyboardInterrupt wherever the program is, and its number is in what this yields.

    A signal that was ignored from the start (nohup, a background job) stays so.
    """
    received: list[int] = []

    def stop(number: int, frame: FrameType | None) -> None:
        received.append(number)
        for each in changed:
            signal.signal(each, signal.SIG_DFL)  # whoever insists need not wait
        raise KeyboardInterrupt

    changed = {number: old for number in STOPPING if (old := signal.getsignal(number)) not in (signal.SIG_IGN, None)}
    for number in changed:
        signal.signal(number, stop)
    try:
        yield received
    finally:
        for number, old in changed.items():
            signal.signal(number, old)
