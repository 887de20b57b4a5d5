"""Limit the number of answers that run or wait at once."""

from __future__ import annotations

import math
import time

from ridgeline.serve.http.errors import APIError

LONGEST_WAIT_SECONDS = 60


class Gate:
    """Places for answers: those that the engine runs at once, and those that may wait. Full, it says when to return."""

    def __init__(self, running: int, waiting: int) -> None:
        self.running, self.capacity = running, running + waiting
        self.open = 0
        self.refused = 0
        self._pace = 1.0  # seconds between two answers that end, smoothed
        self._last = time.perf_counter()

    def enter(self, answers: int) -> None:
        """Take places. Raises APIError: 400 for what can never fit, 429 for what does not fit now."""
        if answers > self.capacity:
            raise APIError(400, f"{answers} answers are asked for at once; this server takes {self.capacity}")
        if self.open + answers > self.capacity:
            self.refused += 1
            wait = math.ceil(min(max(answers * self._pace, 1.0), LONGEST_WAIT_SECONDS))
            raise APIError(
                429, f"the queue is full: {self.open} answers are running or waiting; try again in {wait} s",
                code="queue_full", retry_after=wait,
            )  # fmt: skip
        if not self.open:  # the time without answers is nobody's pace
            self._last = time.perf_counter()
        self.open += answers

    def leave(self, answers: int) -> None:
        """Give places back."""
        self.open -= answers
        now = time.perf_counter()
        self._pace += 0.1 * ((now - self._last) / max(answers, 1) - self._pace)
        self._last = now
