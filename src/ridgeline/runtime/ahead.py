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

AHEAD_TOKENS = 512  # the pages of at least so many tokens after the last one ever handed out are touched
STEP_TOKENS = 128  # touched memory ends at a multiple of the pages of so many tokens
POPULATE_WRITE = 23  # advice of madvise since Linux 5.14: provide memory and keep its contents
PIECE_BYTES = 1 << 21  # touched at once: between two pieces the system can suspend the thread


class Ahead:
    """Touches the pages of a buffer [num_pages, page_bytes] ahead of their use, in threads of the lowest priority.

    Pages are handed out from the first one on; those of AHEAD_TOKENS tokens after the highest one are kept touched.
    """

    def __init__(self, pages: np.ndarray[Any, np.dtype[np.uint8]], page_tokens: int) -> None:
        self._pages = pages
        self._ahead, self._step = -(-AHEAD_TOKENS // page_tokens), -(-STEP_TOKENS // page_tokens)
        self._end = 0  # pages before this one are touched, or soon will be
        self._reached(0)

    def handed_out(self, pages: Sequence[int]) -> None:
        """Touch pages after those that a step is about to use."""
        self._reached(max(pages) + 1)

    def _reached(self, end: int) -> None:
        begin, wanted = max(self._end, end), end + self._ahead
        if self._end < min(wanted, len(self._pages)):
            self._end = min(-(-wanted // self._step) * self._step, len(self._pages))
            if sys.platform == "linux" and begin < self._end:
                threading.Thread(target=_touch, args=(self._pages[begin : self._end],), daemon=True).start()


def _touch(pages: np.ndarray[Any, Any]) -> None:
    with contextlib.suppress(PermissionError):  # a container may forbid priorities: then the thread has the usual one
        os.sched_setscheduler(threading.get_native_id(), os.SCHED_IDLE, os.sched_param(0))
    madvise, size = ctypes.CDLL(None).madvise, mmap.PAGESIZE
    first, last = (at // size * size for at in (pages.ctypes.data, pages.ctypes.data + pages.nbytes))
    # On a system without this advice nothing is touched, and steps wait for their memory.
    for at in range(first, last, PIECE_BYTES):
        madvise(ctypes.c_void_p(at), ctypes.c_size_t(min(PIECE_BYTES, last - at)), POPULATE_WRITE)
