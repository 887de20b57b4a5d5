"""Rows of state in their stored type and in float32. Pages are laid out as their shape says."""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline.spec.storage import SCALE_BYTES, Storage

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "int8": torch.int8}


def store_rows(case: Storage):
    return lambda x: as_stored(x, DTYPES[case.dtype])


def as_stored(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Round x [..., numbers] to a type, ties to even. int8 numbers are multiples of a scale, the largest magnitude over
    127, whose four bytes follow them.
    """
    if dtype != torch.int8:
        return x.to(dtype)
    x = x.float()
    scales = x.abs().amax(-1, keepdim=True) / 127
    inverse = 1 / scales
    broken, tiny = ~(inverse > 0), inverse.isinf()  # broken: infinite or NaN; tiny: without a reciprocal
    scales = scales.masked_fill(broken, torch.nan).masked_fill(tiny, 0.0)
    numbers = (x * inverse).masked_fill(broken | tiny, 0.0).round_()
    return torch.cat((numbers.to(torch.int8), scales.contiguous().view(torch.int8)), -1)


def as_floats(rows: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Convert stored rows to the type of computation."""
    if rows.dtype == torch.int8:
        rows = rows[..., :-SCALE_BYTES] * rows[..., -SCALE_BYTES:].contiguous().view(torch.float32)
    return rows.to(dtype)
