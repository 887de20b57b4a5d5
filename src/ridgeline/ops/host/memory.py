"""Memory of numpy arrays: views of files where the type is kept, aligned pages, bfloat16 through ml_dtypes."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from ridgeline.ops.arrays import QuantizedMatrix
from ridgeline.spec.dtype import DType
from ridgeline.spec.storage import StateDType
from ridgeline.system import free_bytes, huge_pages

Ndarray = np.ndarray[Any, Any]
ALIGNMENT = 64  # bytes: a cache line, which is also the widest vector
RANDOM_BLOCK = 2**22  # numbers that are drawn at once, in float32


def dtype_of(name: str) -> np.dtype[Any]:
    """Return numpy's type for one of our type names: bytes for fp8; bfloat16 comes from ml_dtypes, since numpy lacks
    it.
    """
    if name == "bfloat16":
        import ml_dtypes

        found: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
        return found
    return np.dtype(np.uint8 if name == "fp8" else name)


def widen(x: Ndarray) -> Ndarray:
    """Convert x to float32, exactly, by shifting bits where numpy's conversion is slow."""
    if x.dtype.itemsize != 2:
        return x.astype(np.float32, copy=False)
    if x.dtype != np.float16:  # bfloat16: the upper half of a float32
        bits = np.ascontiguousarray(x).view(np.uint16).astype(np.uint32)
        bits <<= 16
        return bits.view(np.float32)
    # Shift exponent and mantissa to their bits in float32, whose exponent counts from -127 instead of -15.
    signed = np.ascontiguousarray(x).view(np.int16).astype(np.int32)
    signed <<= 13
    signed &= np.int32(-0x70002000)
    wide = signed.view(np.float32)
    wide *= np.float32(2.0**112)
    # Infinity and NaN become finite numbers above all others.
    is_finite = max(wide.max(initial=0.0), -wide.min(initial=0.0)) < 2.0**16
    return wide if is_finite else x.astype(np.float32)


def untouched(shape: tuple[int, ...]) -> Ndarray:
    """Return a new array of bytes, whose memory the system provides at the first touch: cleared, in huge pages if it
    has them. It begins at a huge page, so that each of its pages lies in as few of them as possible.
    """
    size, huge = math.prod(shape), huge_pages().size or ALIGNMENT
    if not hasattr(mmap, "MAP_PRIVATE"):  # Windows
        room: Ndarray = np.empty(size + huge, np.uint8)
        return room[(start := -room.ctypes.data % huge) : start + size].reshape(shape)
    mapping = mmap.mmap(-1, size + huge, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    room = np.frombuffer(mapping, np.uint8)
    start = -room.ctypes.data % huge
    if huge > ALIGNMENT:
        mapping.madvise(mmap.MADV_HUGEPAGE, start, size)
    return room[start : start + size].reshape(shape)


class NumpyMemory:
    """Arrays of numpy in the main memory of this machine."""

    device = "cpu"
    on_host = True
    float_bytes = 4

    def put(self, host: Ndarray, dtype: str, to: str) -> Ndarray:
        x = host.view(dtype_of(dtype)) if dtype == "bfloat16" else host
        return np.ascontiguousarray(x, dtype=dtype_of(to))

    def integers(self, values: Ndarray) -> Ndarray:
        return np.ascontiguousarray(values, dtype=np.int64)

    def quantized(self, matrix: QuantizedMatrix) -> QuantizedMatrix:
        return matrix

    def get(self, array: Any) -> Ndarray:
        return widen(array)

    def to_host(self, array: Any) -> Ndarray:
        return np.asarray(array)

    def from_host(self, host: Ndarray) -> Ndarray:
        return np.ascontiguousarray(host)

    def guard(self) -> AbstractContextManager[None]:
        return nullcontext()

    def free_bytes(self) -> int | None:
        return free_bytes()

    def widen(self, array: Any) -> Ndarray:
        return widen(array)

    def pages(self, num_pages: int, num_bytes: int) -> Ndarray:
        return untouched((num_pages, num_bytes))

    def page_view(self, pages: Any, offset: int, shape: tuple[int, ...], dtype: StateDType) -> Ndarray:
        stored = dtype_of(dtype)
        view: Ndarray = pages[:, offset : offset + math.prod(shape) * stored.itemsize].view(stored)
        return view.reshape(len(pages), *shape)

    def zeros(self, shape: tuple[int, ...]) -> Ndarray:
        return np.zeros(shape, np.float32)

    def copy_pages(self, pages: Any, source: Sequence[int], target: Sequence[int]) -> None:
        pages[list(target)] = pages[list(source)]

    def pages_out(self, pages: Any, index: Sequence[int]) -> Ndarray:
        copies: Ndarray = pages[list(index)]
        return copies

    def pages_in(self, pages: Any, index: Sequence[int], host: Ndarray) -> None:
        pages[list(index)] = host

    def random(self, shape: tuple[int, ...], dtype: DType, std: float, seed: int) -> Ndarray:
        generator, out = np.random.default_rng(seed), np.empty(math.prod(shape), dtype_of(dtype))
        for start in range(0, out.size, RANDOM_BLOCK):
            part = out[start : start + RANDOM_BLOCK]
            part[:] = generator.standard_normal(part.size, np.float32) * np.float32(std)
        return out.reshape(shape)
