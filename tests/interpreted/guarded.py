"""A table whose kernels are interpreted, with poisoned outputs between guards."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ridgeline.ops.api import Op
from ridgeline.ops.reference.backend import ReferenceBackend, SdpaBackend, TorchMemory
from ridgeline.ops.table import OpsTable
from ridgeline.ops.triton.backend import TritonBackend
from ridgeline.ops.triton.launch import Compiled, launch

# The arrays that each kernel writes in full.
OUTPUTS = {
    "dense_product": ("out", "parts"), "round_tokens": ("steps", "token_scales"), "whole_product": ("out",),
    "attend": ("out", "parts"), "normalize": ("out", "total"), "activate": ("out",), "rotate": ("q", "k"),
    "write_entries": (), "place_tokens": ("pages", "slots", "tables"), "known_tokens": ("ids",), "keep_tokens": (),
    "write_rows": (), "best_of_parts": ("ids", "values"), "best_of_rows": ("ids", "values"),
}  # fmt: skip
GUARD = 64  # numbers on both sides of an output that no kernel may write
POISON = {torch.int8: 99, torch.int32: -7, torch.int64: -7}


def guarded(kernel: Any, grid: tuple[int, ...], compiled: Compiled, **arguments: Any) -> None:
    """Start a kernel whose outputs are poison between guards, and check the guards afterwards."""
    given, wide = dict(arguments), {}
    for name in OUTPUTS[kernel.fn.__name__]:
        found = arguments[name]
        if found is None:
            continue
        poison = POISON.get(found.dtype, float("nan"))
        wide[name] = torch.full((found.numel() + 2 * GUARD,), poison, dtype=found.dtype)
        given[name] = wide[name][GUARD:-GUARD].view(found.shape)
    with np.errstate(invalid="ignore"):  # infinities and NaN are allowed; an overflow is an error
        launch(kernel, grid, compiled, **given)
    for name, whole in wide.items():
        for side in (whole[:GUARD], whole[-GUARD:]):
            poison = POISON.get(side.dtype)
            is_kept = side.isnan().all() if poison is None else (side == poison).all()
            assert is_kept, f"{kernel.fn.__name__} wrote outside of {name}"
        arguments[name].copy_(given[name])


def interpreted(slices: int = 2, **overrides: str) -> OpsTable:
    """Return the table of device cuda with torch's CPU tensors; overrides: as in `open_table`."""
    backends = TritonBackend(guarded, slices), SdpaBackend(), ReferenceBackend()
    return OpsTable(TorchMemory("reference"), backends, overrides)


def reference() -> OpsTable:
    """Return the table of the definitions."""
    return OpsTable(TorchMemory("reference"), (ReferenceBackend(),))


def serves(table: OpsTable, op: Op[Any], case: object) -> bool:
    """Return whether our kernels serve an op."""
    return table.choose(op, case).backend == "triton"
