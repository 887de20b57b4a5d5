"""Rows of state as they are stored, and as float32; in pages they stand as their shape says."""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline.spec.storage import SCALE_BYTES, Storage

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "int8": torch.int8}


def store_rows(case: Storage):
    return lambda x: as_stored(x, DTYPES[case.dtype])


def as_stored(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x [..., numbers], to the nearest number of a type, ties to even; int8 as multiples of a scale, the largest
    magnitude over 127, whose four bytes stand behind them.
    """
    if dtype != torch.int8:
        return x.to(dtype)
    x = x.float()
    scales = x.abs().amax(-1, keepdim=True) / 127
    inverse = 1 / scales
    broken, tiny = ~(inverse > 0), inverse.isinf()  # an infinity or a NaN; a scale that has no reciprocal
    scales = scales.masked_fill(broken, torch.nan).masked_fill(tiny, 0.0)
    numbers = (x * inverse).masked_fill(broken | tiny, 0.0).round_()
    return torch.cat((numbers.to(torch.int8), scales.contiguous().view(torch.int8)), -1)


def as_floats(rows: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Stored rows in the type in which they are computed with."""
    if rows.dtype == torch.int8:
        rows = rows[..., :-SCALE_BYTES] * rows[..., -SCALE_BYTES:].contiguous().view(torch.float32)
    return rows.to(dtype)
