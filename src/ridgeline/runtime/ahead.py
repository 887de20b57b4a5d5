"""Memory behind pages, asked of the system before a step needs it.

An arena is room that the system gives at its first touch, 2 MiB at a time, cleared. The step that writes a page first
would wait for that: a prompt of 128 tokens of a 135M for a fifth of its time (docs/log/kernels.md, 2026-11-22).
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

AHEAD_TOKENS = 512  # for which pages are there beyond the last one that was ever handed out, at least
STEP_TOKENS = 128  # what is there ends on a multiple of the pages for so many
POPULATE_WRITE = 23  # of madvise, Linux 5.14 on: memory is given, and what it holds stays
PIECE_BYTES = 1 << 21  # at once: between pieces the thread can be put aside


class Ahead:
    """Of one buffer of pages [num_pages, page_bytes], handed out from the first one on: keeps those of AHEAD_TOKENS
    tokens touched beyond the highest, by threads of the least priority that there is.
    """

    def __init__(self, pages: np.ndarray[Any, np.dtype[np.uint8]], page_tokens: int) -> None:
        self._pages = pages
        self._ahead, self._step = -(-AHEAD_TOKENS // page_tokens), -(-STEP_TOKENS // page_tokens)
        self._end = 0  # pages from the first that are touched, or soon will be
        self._reached(0)

    def handed_out(self, pages: Sequence[int]) -> None:
        self._reached(max(pages) + 1)

    def _reached(self, end: int) -> None:
        begin, wanted = max(self._end, end), end + self._ahead
        if self._end < min(wanted, len(self._pages)):
            self._end = min(-(-wanted // self._step) * self._step, len(self._pages))
            if sys.platform == "linux" and begin < self._end:
                threading.Thread(target=_touch, args=(self._pages[begin : self._end],), daemon=True).start()


def _touch(pages: np.ndarray[Any, Any]) -> None:
    with contextlib.suppress(PermissionError):  # of a container that allows no priorities: the threads share, then
        os.sched_setscheduler(threading.get_native_id(), os.SCHED_IDLE, os.sched_param(0))
    madvise, size = ctypes.CDLL(None).madvise, mmap.PAGESIZE
    first, last = (at // size * size for at in (pages.ctypes.data, pages.ctypes.data + pages.nbytes))
    # Where the system knows no such advice nothing is touched, and steps wait as they would without.
    for at in range(first, last, PIECE_BYTES):
        madvise(ctypes.c_void_p(at), ctypes.c_size_t(min(PIECE_BYTES, last - at)), POPULATE_WRITE)
