"""The memory of pages is allocated before they are written, and keeps its data."""

import ctypes
import os
import platform
import resource
import sys
import threading
from typing import Any

import numpy as np
import pytest

from ridgeline.ops.host.memory import untouched
from ridgeline.runtime.ahead import Ahead
from ridgeline.spec.groups import AHEAD_TOKENS, NULL_PAGE, TOUCH_TOKENS, StateGroup
from ridgeline.spec.state import ALL
from ridgeline.system import huge_pages

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
        if thread is not threading.current_thread() and "_populate" in thread.name:
            thread.join()


def rows(page_tokens: int = 16) -> StateGroup:
    return StateGroup("kv", page_tokens, ALL, PAGE)


@pytest.mark.skipif(SYSTEM < (5, 14), reason="MADV_POPULATE_WRITE needs Linux 5.14")
def test_pages_are_there_before_they_are_used() -> None:
    pages, ahead_of, each = untouched((200, PAGE)), AHEAD_TOKENS // 16, TOUCH_TOKENS // 16
    ahead = Ahead(pages, rows())
    slack = 2 * HUGE

    def check(count: int) -> None:
        wait()
        assert ahead.num_resident == count
        assert abs(resident(pages) - count * PAGE) < slack

    check(ahead_of + each)  # the null page and 32 more, in whole ranges of a step
    for last in (0, each // 2, each - 1):  # all three pages are in the range of one step
        ahead.handed_out([NULL_PAGE, last])
        check(ahead_of + each)
    pages[:20] = 7
    ahead.handed_out([3, 2 * each])
    check(ahead_of + 3 * each)
    # After a chunk of 60 pages, the next one needs as many. Null pages do not count.
    ahead.handed_out([*[NULL_PAGE] * 99, *range(17, 77)])
    pages[:77] = 7
    check(18 * each)
    ahead.handed_out([5])
    check(18 * each)
    ahead.handed_out([len(pages) - 1])  # the step itself allocates the pages that it is about to write
    wait()
    assert ahead.num_resident == len(pages)
    assert abs(resident(pages) - 18 * each * PAGE) < slack
    assert (pages[:77] == 7).all()


@pytest.mark.skipif(SYSTEM < (5, 14), reason="MADV_POPULATE_WRITE needs Linux 5.14")
def test_a_sequence_finds_memory_for_its_recurrent_states() -> None:
    pages, states = untouched((20, PAGE)), StateGroup("snapshot", 4096, 1, PAGE, snapshot=True)
    ahead = Ahead(pages, states)
    wait()
    assert ahead.num_resident == 3 and resident(pages[1:3]) >= 2 * PAGE - 4096


def test_a_small_arena() -> None:
    pages = np.full((3, 100), 9, np.uint8)
    ahead = Ahead(pages, rows())
    ahead.handed_out([2])
    wait()
    assert (pages == 9).all() and ahead.num_resident == 3


@pytest.mark.skipif(not huge_pages().size, reason=f"no huge pages: {huge_pages().reason}")
def test_pages_of_state_lie_in_huge_pages() -> None:
    """The first touch of each 2 MiB costs one page fault, and not 512."""
    pages = untouched((64, PAGE))
    assert pages.ctypes.data % HUGE == 0 and not pages[:1].any()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    pages[:] = 1
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < 64 * PAGE // 4096 // 4


@pytest.mark.parametrize("shape", [(0, 5), (1, 7), (100, 63), (257, 4096)])
def test_untouched_memory_is_an_array_of_zeros(shape: tuple[int, int]) -> None:
    pages = untouched(shape)
    assert pages.shape == shape and pages.dtype == np.uint8 and not pages.any()
    pages[:] = 3
    assert (pages == 3).all()
