"""Detect other programs that load the machine during a measurement."""

from __future__ import annotations

import os
import time

from ridgeline.system import busy_seconds


class OthersLoad:
    """Measures the share of all cores that other programs used since the object was created."""

    def __init__(self) -> None:
        self._began = time.perf_counter(), busy_seconds(), _own_s()

    def share(self) -> float:
        wall = time.perf_counter() - self._began[0]
        others = (busy_seconds() - self._began[1]) - (_own_s() - self._began[2])
        return min(max(others / max(wall * (os.cpu_count() or 1), 1e-9), 0.0), 1.0)  # both clocks are coarse


def _own_s() -> float:
    times = os.times()
    return times.user + times.system
