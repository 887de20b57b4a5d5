"""Rows of state in their stored type and in float32: rounding, and the layout of pages."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import ml_dtypes
import numpy as np

from ridgeline.ops.host.memory import Ndarray, dtype_of, widen
from ridgeline.spec.quant import NUMBERS
from ridgeline.spec.storage import SCALE_BYTES, Storage

FP8_MOST = 448  # the largest number of e4m3
HALF_MOST = 65504  # the largest number of float16
_FP8 = np.array(NUMBERS["fp8"].levels, np.float32)


def store_rows(case: Storage) -> Callable[..., Ndarray]:
    def store(x: Ndarray, scale: float = 1.0) -> Ndarray:
        if case.dtype == "fp8":
            return saturated(x, scale)
        if case.dtype != "int8":
            return rounded(x, dtype_of(case.dtype))
        numbers, scales = quantize(x)
        return np.concatenate((numbers, scales[..., None].view(np.int8)), -1)

    return store


def rounded(x: Ndarray, dtype: np.dtype[np.generic]) -> Ndarray:
    """Round x to a floating point type, ties to even. In float16 finite numbers beyond 65,504 become 65,504."""
    if dtype == np.float16:
        x = np.where(np.isfinite(x), np.clip(x, -HALF_MOST, HALF_MOST), x)
    with np.errstate(over="ignore"):
        return x.astype(dtype)


def quantize(x: Ndarray) -> tuple[Ndarray, Ndarray]:
    """Return x [..., numbers] as integers of at most 127, and scales [...]; the same operations as in csrc/pages.h."""
    with np.errstate(all="ignore"):
        scales = np.abs(x).max(-1) / np.float32(127)
        inverse = np.float32(1) / scales
        broken, tiny = ~(inverse > 0), np.isinf(inverse)
        scales[broken], scales[tiny] = np.nan, 0.0
        inverse[broken | tiny] = 0.0
        numbers = np.rint(np.where(inverse[..., None] > 0, x * inverse[..., None], np.float32(0)))
    return numbers.astype(np.int8), scales


def to_fp8(x: Ndarray) -> Ndarray:
    """Round numbers of at most 448 to e4m3, ties to even; the codes are uint8."""
    return x.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)


def saturated(x: Ndarray, scale: float) -> Ndarray:
    """Return x / scale in e4m3. Finite numbers beyond 448 become 448, all others NaN; as csrc/simd.h does."""
    with np.errstate(all="ignore"):
        steps = x / np.float32(scale)
        return to_fp8(np.where(np.isfinite(steps), np.clip(steps, -FP8_MOST, FP8_MOST), np.float32(np.nan)))


def as_floats(rows: Ndarray, scale: float = 1.0) -> Ndarray:
    """Return stored rows [..., numbers] in float32; float64 stays. int8 has scales at the end of rows. scale: the scale
    of numbers in fp8.
    """
    if rows.dtype == np.uint8:
        found: Ndarray = _FP8[rows]
        found *= np.float32(scale)
        return found
    if rows.dtype == np.int8:
        numbers, scales = rows[..., :-SCALE_BYTES], np.ascontiguousarray(rows[..., -SCALE_BYTES:]).view(np.float32)
        return numbers * scales
    return rows if rows.dtype == np.float64 else widen(rows)


class PageView(NamedTuple):
    """Views of one part of the state in pages: its numbers, and its scales if it has any."""

    numbers: Ndarray
    scales: Ndarray | None


def keys_of(pages: Ndarray) -> PageView:
    """Return views of keys [pages, page_tokens, K, D] in this device's layout: [pages, K, D, page_tokens], and scales
    [pages, K, page_tokens], which follow the numbers of their head.

    Neighboring keys are neighbors in memory, because the kernels read them so. All backends of a device use one layout.
    """
    whole, size = _heads(pages)
    numbers, scales = _parted(whole, pages.dtype == np.int8, size)
    return PageView(_seen_as(numbers, (*whole.shape[:2], -1, size)), scales)


def values_of(pages: Ndarray) -> PageView:
    """Return views of values: [pages, K, page_tokens, D], and scales as `keys_of` does."""
    whole, size = _heads(pages)
    numbers, scales = _parted(whole, pages.dtype == np.int8, size)
    return PageView(_seen_as(numbers, (*whole.shape[:2], size, -1)), scales)


def latents_of(pages: Ndarray) -> PageView:
    """Return views of latents, which have the layout of values with one head: [pages, 1, page_tokens, numbers]."""
    return values_of(pages) if pages.dtype == np.int8 else PageView(pages.swapaxes(1, 2), None)


def read_rows(view: PageView, index: Ndarray, numbers_last: bool, scale: float = 1.0) -> Ndarray:
    """Copy keys or values of pages [n, P] in float32: [n, P * page_tokens, K, D].

    numbers_last: whether the view has the layout of values. scale: the scale of numbers in fp8.
    """
    found = view.numbers[index]  # [n, P, K, ...]
    found = found.swapaxes(2, 3) if numbers_last else found.transpose(0, 1, 4, 2, 3)
    found = found.reshape(len(index), -1, *found.shape[3:])
    rows = as_floats(found, scale) if found.dtype == np.uint8 else widen(found)
    if view.scales is not None:
        rows *= view.scales[index].swapaxes(2, 3).reshape(*rows.shape[:3], 1)
    return rows


def write_rows(
    view: PageView, x: Ndarray, page: Ndarray, slot: Ndarray, numbers_last: bool, scale: float = 1.0
) -> None:
    """Write x [T, K, D] into slots of pages. scale: the scale of numbers in fp8."""
    if view.numbers.dtype == np.uint8:
        numbers = saturated(x, scale)
    elif view.scales is None:
        numbers = rounded(x, view.numbers.dtype)
    else:
        numbers, view.scales[page, :, slot] = quantize(x)
    if numbers_last:
        view.numbers[page, :, slot] = numbers
    else:
        view.numbers[page, :, :, slot] = numbers


def _heads(pages: Ndarray) -> tuple[Ndarray, int]:
    """Return pages divided by heads, [pages, K, ...], and the tokens of a page."""
    count, size, heads, row = pages.shape
    return _seen_as(pages, (count, heads, size * row)), size


def _parted(whole: Ndarray, has_scales: bool, size: int) -> PageView:
    if not has_scales:
        return PageView(whole, None)
    end = whole.shape[-1] - SCALE_BYTES * size
    return PageView(whole[..., :end], whole[..., end:].view(np.float32))


def _seen_as(pages: Ndarray, shape: tuple[int, ...]) -> Ndarray:
    seen = pages.reshape(shape)
    if not np.may_share_memory(seen, pages):  # a copy would lose what is written to it
        raise ValueError(f"pages {pages.shape} must be dense behind their first axis")
    return seen
