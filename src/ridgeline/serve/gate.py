"""Limit the number of answers that run or wait at once."""

from __future__ import annotations

import math
import time

from ridgeline.serve.http.errors import APIError

LONGEST_WAIT_SECONDS = 60  # upper bound of Retry-After


class Gate:
    """Limits the number of sequences that run or wait. When it is full, it estimates when to retry.

    running: number of sequences that the engine runs at once. waiting: number of sequences that may wait.
    """

    def __init__(self, running: int, waiting: int) -> None:
        self.running, self.capacity = running, running + waiting
        self.open = 0
        self.refused = 0
        self._pace = 1.0  # seconds from one finished sequence to the next, smoothed
        self._last = time.perf_counter()

    def enter(self, answers: int) -> None:
        """Take slots. Raises APIError: 400 if the request can never fit, 429 if it does not fit now."""
        if answers > self.capacity:
            raise APIError(
                400, f"the request is for {answers} answers; this server accepts {self.capacity} at once: ask for fewer"
            )
        if self.open + answers > self.capacity:
            self.refused += 1
            wait = math.ceil(min(max(answers * self._pace, 1.0), LONGEST_WAIT_SECONDS))
            raise APIError(
                429, f"the queue is full with {self.open} running or waiting answers; try again in {wait} s",
                code="queue_full", retry_after=wait,
            )  # fmt: skip
        if not self.open:  # idle time says nothing about the pace
            self._last = time.perf_counter()
        self.open += answers

    def leave(self, answers: int) -> None:
        """Free slots."""
        self.open -= answers
        now = time.perf_counter()
        self._pace += 0.1 * ((now - self._last) / max(answers, 1) - self._pace)
        self._last = now
