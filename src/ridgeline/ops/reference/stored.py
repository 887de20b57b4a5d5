"""Rows of state in their stored type and in float32.

Pages are laid out as their shape says, but for int8: there all scales of a page's part come first, and then all
numbers. So a head's numbers begin at a multiple of their own size, and a GPU can load 16 bytes of them at once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline.spec.storage import SCALE_BYTES, Storage

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "int8": torch.int8,
          "fp8": torch.uint8}  # fmt: skip
FP8_MOST = 448  # the largest number of e4m3
HALF_MOST = 65504  # the largest number of float16


def store_rows(case: Storage):
    return lambda x, scale=1.0: as_stored(x, DTYPES[case.dtype], scale)


def to_fp8(x: Tensor) -> Tensor:
    """Round numbers of at most 448 to e4m3, ties to even; the codes are uint8."""
    return x.to(torch.float8_e4m3fn).view(torch.uint8)


def as_stored(x: Tensor, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    """Round x [..., numbers] to a type, ties to even. In float16 finite numbers beyond 65,504 become 65,504. int8
    numbers are multiples of a scale, the largest magnitude over 127, whose four bytes follow them. fp8 is x / scale in
    e4m3: finite numbers beyond 448 become 448, all others NaN.
    """
    if dtype == torch.uint8:
        x = x.float()
        steps = x / x.new_full((), scale)  # a GPU would multiply with the inverse of a number of Python
        return to_fp8(torch.where(steps.isfinite(), steps.clamp(-FP8_MOST, FP8_MOST), torch.nan))
    if dtype == torch.float16:
        x = torch.where(x.isfinite(), x.clamp(-HALF_MOST, HALF_MOST), x)
    if dtype != torch.int8:
        return x.to(dtype)
    x = x.float()
    scales = x.abs().amax(-1, keepdim=True) / 127
    inverse = 1 / scales
    broken, tiny = ~(inverse > 0), inverse.isinf()  # broken: infinite or NaN; tiny: without a reciprocal
    scales = scales.masked_fill(broken, torch.nan).masked_fill(tiny, 0.0)
    numbers = (x * inverse).masked_fill(broken | tiny, 0.0).round_()
    return torch.cat((numbers.to(torch.int8), scales.contiguous().view(torch.int8)), -1)


def as_floats(rows: Tensor, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
    """Convert stored rows to the type of computation. scale: the scale of numbers in fp8."""
    if rows.dtype == torch.uint8:
        rows = rows.view(torch.float8_e4m3fn).float().mul_(scale)
    if rows.dtype == torch.int8:
        rows = rows[..., :-SCALE_BYTES] * rows[..., -SCALE_BYTES:].contiguous().view(torch.float32)
    return rows.to(dtype)


def planes(pages: Tensor) -> tuple[Tensor, Tensor]:
    """Return views of int8 pages [pages, page_tokens, heads, numbers + 4]: the numbers [pages, page_tokens, heads,
    numbers], and the scales [pages, page_tokens, heads] in float32. Pages are dense behind their first axis.
    """
    count, tokens, heads, row = pages.shape
    stride, begin = pages.stride(0), pages.storage_offset()
    size = heads * (row - SCALE_BYTES)
    numbers = pages.as_strided(
        (count, tokens, heads, row - SCALE_BYTES), (stride, size, row - SCALE_BYTES, 1),
        begin + tokens * heads * SCALE_BYTES,
    )  # fmt: skip
    scales = pages.as_strided((count, tokens * heads * SCALE_BYTES), (stride, 1), begin).view(torch.float32)
    return numbers, scales.unflatten(1, (tokens, heads))


def write_pages(pages: Tensor, x: Tensor, page: Tensor, slot: Tensor, scale: float = 1.0) -> None:
    """Write rows x [T, heads, numbers] into slots of pages. scale: the scale of numbers in fp8."""
    rows = as_stored(x, pages.dtype, scale)
    if pages.dtype != torch.int8:
        pages[page, slot] = rows
        return
    numbers, scales = planes(pages)
    numbers[page, slot] = rows[..., :-SCALE_BYTES]
    scales[page, slot] = rows[..., -SCALE_BYTES:].contiguous().view(torch.float32).squeeze(-1)


def read_pages(pages: Tensor, index: Tensor, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    """Copy the rows of pages [n, P] in the type of computation: [n, P * page_tokens, heads, numbers]."""
    if pages.dtype != torch.int8:
        return as_floats(pages[index].flatten(1, 2), dtype, scale)
    numbers, scales = planes(pages)
    return (numbers[index] * scales[index][..., None]).flatten(1, 2).to(dtype)
