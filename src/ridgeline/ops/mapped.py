"""Release pages of files that are mapped into memory."""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np


def release(array: Any) -> None:
    """Release the memory of the mapped file that holds an array. The file is read again when the array is.

    Arrays outside of mapped files are left alone. Mapped files are never written to, so that nothing is lost.
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
