"""Rows of state as they are stored, and as float32: rounding on the way in, and where everything stands in pages."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from ridgeline.ops.host.memory import Ndarray, dtype_of, widen
from ridgeline.spec.storage import SCALE_BYTES, Storage


def store_rows(case: Storage) -> Callable[[Ndarray], Ndarray]:
    def store(x: Ndarray) -> Ndarray:
        if case.dtype != "int8":
            return rounded(x, dtype_of(case.dtype))
        numbers, scales = quantize(x)
        return np.concatenate((numbers, scales[..., None].view(np.int8)), -1)

    return store


def rounded(x: Ndarray, dtype: np.dtype[np.generic]) -> Ndarray:
    """x in a type of floating point, to the nearest, ties to even; what is too large becomes infinite."""
    with np.errstate(over="ignore"):
        return x.astype(dtype)


def quantize(x: Ndarray) -> tuple[Ndarray, Ndarray]:
    """x [..., numbers] as integers of at most 127 and scales [...]: operation by operation as in csrc/pages.h."""
    with np.errstate(all="ignore"):
        scales = np.abs(x).max(-1) / np.float32(127)
        inverse = np.float32(1) / scales
        broken, tiny = ~(inverse > 0), np.isinf(inverse)
        scales[broken], scales[tiny] = np.nan, 0.0
        inverse[broken | tiny] = 0.0
        numbers = np.rint(np.where(inverse[..., None] > 0, x * inverse[..., None], np.float32(0)))
    return numbers.astype(np.int8), scales


def as_floats(rows: Ndarray) -> Ndarray:
    """Stored rows [..., numbers], their scales behind them, in float32; float64 stays."""
    if rows.dtype == np.int8:
        numbers, scales = rows[..., :-SCALE_BYTES], np.ascontiguousarray(rows[..., -SCALE_BYTES:]).view(np.float32)
        return numbers * scales
    return rows if rows.dtype == np.float64 else widen(rows)


class Places(NamedTuple):
    """Numbers of a part as they lie in pages, and their scales, where there are any: views."""

    numbers: Ndarray
    scales: Ndarray | None


def keys_of(pages: Ndarray) -> Places:
    """A view of keys [pages, page_tokens, K, D] as they lie on this device: [pages, K, D, page_tokens], and scales
    [pages, K, page_tokens], those of a head behind its numbers.

    Neighboring keys are neighbors in memory, as the kernels want them: all backends of a device agree on that.
    """
    whole, size = _heads(pages)
    numbers, scales = _parted(whole, pages.dtype == np.int8, size)
    return Places(_seen_as(numbers, (*whole.shape[:2], -1, size)), scales)


def values_of(pages: Ndarray) -> Places:
    """The same of values: [pages, K, page_tokens, D]."""
    whole, size = _heads(pages)
    numbers, scales = _parted(whole, pages.dtype == np.int8, size)
    return Places(_seen_as(numbers, (*whole.shape[:2], size, -1)), scales)


def latents_of(pages: Ndarray) -> Places:
    """The same of latents, which lie like the values of one head: [pages, 1, page_tokens, numbers]."""
    return values_of(pages) if pages.dtype == np.int8 else Places(pages.swapaxes(1, 2), None)


def read_places(places: Places, index: Ndarray, numbers_last: bool) -> Ndarray:
    """Keys or values of pages [n, P] in float32, a copy: [n, P * page_tokens, K, D]. numbers_last: as values lie."""
    found = places.numbers[index]  # [n, P, K, ...]
    found = found.swapaxes(2, 3) if numbers_last else found.transpose(0, 1, 4, 2, 3)
    rows = widen(found.reshape(len(index), -1, *found.shape[3:]))
    if places.scales is not None:
        rows *= places.scales[index].swapaxes(2, 3).reshape(*rows.shape[:3], 1)
    return rows


def write_places(places: Places, x: Ndarray, page: Ndarray, slot: Ndarray, numbers_last: bool) -> None:
    """x [T, K, D] into slots of pages."""
    if places.scales is None:
        numbers = rounded(x, places.numbers.dtype)
    else:
        numbers, places.scales[page, :, slot] = quantize(x)
    if numbers_last:
        places.numbers[page, :, slot] = numbers
    else:
        places.numbers[page, :, :, slot] = numbers


def _heads(pages: Ndarray) -> tuple[Ndarray, int]:
    """Head by head what a page holds, [pages, K, ...], and the tokens of a page."""
    count, size, heads, row = pages.shape
    return _seen_as(pages, (count, heads, size * row)), size


def _parted(whole: Ndarray, has_scales: bool, size: int) -> Places:
    if not has_scales:
        return Places(whole, None)
    end = whole.shape[-1] - SCALE_BYTES * size
    return Places(whole[..., :end], whole[..., end:].view(np.float32))


def _seen_as(pages: Ndarray, shape: tuple[int, ...]) -> Ndarray:
    seen = pages.reshape(shape)
    if not np.may_share_memory(seen, pages):  # what is written into a copy is lost
        raise ValueError(f"pages {pages.shape} must be dense behind their first axis")
    return seen
