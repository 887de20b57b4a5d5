"""The memory of pages is allocated before they are written, and keeps its data."""

import ctypes
import os
import platform
import sys
import threading
from typing import Any

import numpy as np
import pytest

from ridgeline.ops.host.memory import aligned
from ridgeline.runtime.ahead import AHEAD_TOKENS, STEP_TOKENS, Ahead

SYSTEM = tuple(int(x) for x in platform.release().split("-")[0].split(".")[:2]) if sys.platform == "linux" else (0, 0)
PAGE, HUGE = 1 << 20, 2 << 20


def resident(pages: np.ndarray[Any, Any]) -> int:
    """Return the number of bytes of the pages that are resident."""
    size = os.sysconf("SC_PAGE_SIZE")
    first = -(-pages.ctypes.data // size) * size
    count = (pages.nbytes - size) // size
    given = np.zeros(count, np.uint8)
    address = ctypes.c_void_p(first), ctypes.c_size_t(count * size)
    assert ctypes.CDLL(None).mincore(*address, given.ctypes.data_as(ctypes.c_void_p)) == 0
    return int((given & 1).sum()) * size


def wait() -> None:
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and "_touch" in thread.name:
            thread.join()


@pytest.mark.skipif(SYSTEM < (5, 14), reason="MADV_POPULATE_WRITE needs Linux 5.14")
def test_pages_are_there_before_they_are_used() -> None:
    pages, ahead_of, each = aligned((160, PAGE)), AHEAD_TOKENS // 16, STEP_TOKENS // 16
    ahead = Ahead(pages, 16)
    slack = 2 * HUGE
    wait()
    assert abs(resident(pages) - ahead_of * PAGE) < slack
    for last in (0, each // 2, each - 1):  # all three pages are in the range of one step
        ahead.handed_out([0, last])
        wait()
        assert abs(resident(pages) - (ahead_of + each) * PAGE) < slack
    pages[:20] = 7
    ahead.handed_out([3, 2 * each])
    wait()
    assert abs(resident(pages) - (ahead_of + 3 * each) * PAGE) < slack
    ahead.handed_out([len(pages) - 1])  # the step itself allocates the pages that it is about to write
    wait()
    assert abs(resident(pages) - (ahead_of + 3 * each) * PAGE) < slack
    assert (pages[:20] == 7).all()


def test_a_small_arena() -> None:
    pages = np.full((3, 100), 9, np.uint8)
    ahead = Ahead(pages, 16)
    ahead.handed_out([2])
    wait()
    assert (pages == 9).all()
