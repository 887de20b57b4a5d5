"""Memory behind pages is there before they are written, and keeps what it holds."""

import platform
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from ridgeline.ops.host.memory import aligned
from ridgeline.runtime.ahead import AHEAD_BYTES, Ahead

SYSTEM = tuple(int(x) for x in platform.release().split("-")[0].split(".")[:2]) if sys.platform == "linux" else (0, 0)
PAGE = 1 << 16


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def wait() -> None:
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and "_touch" in thread.name:
            thread.join()


@pytest.mark.skipif(SYSTEM < (5, 14), reason="MADV_POPULATE_WRITE is of Linux 5.14")
def test_pages_are_there_before_they_are_used() -> None:
    pages, before = aligned((4 * AHEAD_BYTES // PAGE, PAGE)), resident()
    ahead = Ahead(pages)
    wait()
    assert 0.9 < (resident() - before) / AHEAD_BYTES < 1.2
    pages[:100] = 7
    ahead.handed_out(range(100))  # there is enough beyond them
    wait()
    assert (resident() - before) / AHEAD_BYTES < 1.2
    half = AHEAD_BYTES // PAGE // 2
    ahead.handed_out([3, half + 1])
    wait()
    assert 1.4 < (resident() - before) / AHEAD_BYTES < 1.7
    ahead.handed_out([len(pages) - 1])  # only to the end
    wait()
    assert (resident() - before) / AHEAD_BYTES < 2
    assert (pages[:100] == 7).all()


def test_a_small_arena() -> None:
    pages = np.full((3, 100), 9, np.uint8)
    ahead = Ahead(pages)
    ahead.handed_out([2])
    wait()
    assert (pages == 9).all()
