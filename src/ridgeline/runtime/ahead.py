"""Touch the memory of pages before a step needs it.

The system provides an arena's memory at the first touch, 2 MiB at a time, cleared. A step that is the first to write a
page would wait for that: a fifth of the time of a prompt of 128 tokens with a 135M model (docs/log.md, 2026-11-22).
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import sys
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from ridgeline.spec.groups import NULL_PAGE, StateGroup

POPULATE_WRITE = 23  # advice of madvise since Linux 5.14: provide memory and keep its contents
PIECE_BYTES = 1 << 21  # touched at once: between two pieces the system can suspend the thread


class Ahead:
    """Touches the pages of a buffer [num_pages, page_bytes] ahead of their use, in threads of the lowest priority.

    Pages that were never used are handed out in ascending order. After the highest one that was, so many are kept
    touched as the group asks for (`ahead_pages`), and after a longer chunk of a prompt as many as it took: the next
    chunk needs as many. So the first chunk of a prompt finds what was touched while the engine was idle, and the next
    one what was touched while the first was computed, as far as a core was free.
    """

    def __init__(self, pages: np.ndarray[Any, np.dtype[np.uint8]], group: StateGroup) -> None:
        self._pages, self._group = pages, group
        self._used = 1  # pages before this one were handed out; the first one is never
        self._touched = 0  # pages before this one are touched, or soon will be
        self._touch(group.ahead_pages)

    @property
    def num_resident(self) -> int:
        """Number of pages that were used or touched: the system has provided their memory."""
        return min(max(self._used, self._touched), len(self._pages))

    def handed_out(self, pages: Sequence[int]) -> None:
        """Touch pages after those that a sequence is about to use."""
        if (end := max(pages) + 1) > self._used:
            self._used = end
            self._touch(max(self._group.ahead_pages, len(pages) - list(pages).count(NULL_PAGE)))

    def _touch(self, count: int) -> None:
        """Touch so many pages after the used ones."""
        wanted, step = min(self._used + count, len(self._pages)), self._group.touch_pages
        if sys.platform != "linux" or wanted <= self._touched:
            return
        begin = max(self._touched, self._used)
        self._touched = min(-(-wanted // step) * step, len(self._pages))
        if begin < self._touched:
            threading.Thread(target=_populate, args=(self._pages[begin : self._touched],), daemon=True).start()


def _populate(pages: np.ndarray[Any, Any]) -> None:
    with contextlib.suppress(PermissionError):  # a container may forbid priorities: then the thread has the usual one
        os.sched_setscheduler(threading.get_native_id(), os.SCHED_IDLE, os.sched_param(0))
    madvise, size = ctypes.CDLL(None).madvise, mmap.PAGESIZE
    first, last = (at // size * size for at in (pages.ctypes.data, pages.ctypes.data + pages.nbytes))
    # On a system without this advice nothing is touched, and steps wait for their memory.
    for at in range(first, last, PIECE_BYTES):
        madvise(ctypes.c_void_p(at), ctypes.c_size_t(min(PIECE_BYTES, last - at)), POPULATE_WRITE)
