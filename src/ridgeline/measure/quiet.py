"""Is the machine our own while we measure?"""

from __future__ import annotations

import os
import time
from pathlib import Path


class OthersLoad:
    """The share of all cores that other programs took since it was made; 0 where the system does not say."""

    def __init__(self) -> None:
        self._began = time.perf_counter(), _busy_s(), _own_s()

    def share(self) -> float:
        wall = time.perf_counter() - self._began[0]
        others = (_busy_s() - self._began[1]) - (_own_s() - self._began[2])
        return max(others / max(wall * (os.cpu_count() or 1), 1e-9), 0.0)


def _busy_s() -> float:
    """Seconds that all programs have computed since the machine was started, on all cores."""
    path = Path("/proc/stat")
    if not path.exists():
        return _own_s()
    user, nice, system, _, _, irq, softirq, steal = map(int, path.read_text().split("\n", 1)[0].split()[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def _own_s() -> float:
    times = os.times()
    return times.user + times.system
