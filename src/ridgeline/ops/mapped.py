"""Files that are mapped into memory: which of their pages stay."""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np


def release(array: Any) -> None:
    """Let go of the pages of a mapped file that an array lies in; they come back from the file when they are read.

    Nothing is done with an array that lies elsewhere. No page of a mapped file is ever written to, so nothing is lost.
    """
    root = array
    while isinstance(getattr(root, "base", None), np.ndarray):
        root = root.base
    mapped = getattr(root, "base", None)
    if not isinstance(mapped, mmap.mmap) or not array.size or not hasattr(mapped, "madvise"):
        return
    first = array.ctypes.data - root.ctypes.data
    last = first + sum((n - 1) * step for n, step in zip(array.shape, array.strides, strict=True)) + array.itemsize
    start = first // mmap.PAGESIZE * mmap.PAGESIZE
    mapped.madvise(mmap.MADV_DONTNEED, start, last - start)
