"""A table whose kernels are interpreted, or run on a GPU if there is one, with poisoned outputs between guards."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from ridgeline.ops.api import Op
from ridgeline.ops.reference.backend import ReferenceBackend, SdpaBackend, TorchMemory
from ridgeline.ops.table import OpsTable
from ridgeline.ops.triton.backend import TritonBackend
from ridgeline.ops.triton.launch import Compiled, launch

# The arrays that each kernel writes, as far as they are read.
OUTPUTS = {
    "dense_product": ("out", "parts", "whole", "total"), "round_tokens": ("steps", "token_scales"),
    "whole_product": ("out", "whole"),
    "attend": ("out", "parts"), "normalize": ("out", "total", "token_scales"), "activate": ("out",),
    "write_entries": (), "place_tokens": ("pages", "slots", "tables"), "known_tokens": ("ids",), "keep_tokens": (),
    "write_rows": (), "best_of_parts": ("ids", "values"), "best_of_rows": ("ids", "values"),
    "cut_rows": ("tops", "likely", "cuts"), "try_drafts": ("taken",),
    "draw_of_parts": ("part_ids", "part_values", "ids"),
    "choose_experts": ("ids", "weights", "visits", "table", "num_blocks"),
    "rate_and_choose": ("total", "x", "logits", "parts", "ids", "weights", "visits", "table", "num_blocks"),
    "sort_visits": ("visits", "table", "num_blocks"),
    "expert_product": ("out", "sums", "beside_out"),
    "convolve": ("y",), "linear_scan": ("y",), "selective_scan": ("y",), "delta_scan": ("y",),
    "state_space_scan": ("y",), "taylor_scan": ("y",), "gated_rows": ("out",),
    "delta_step": ("y",), "ssd_step": ("y",), "lightning_step": ("y",), "convolution_step": ("y",),
    "multiply_rows": ("out",), "multiply_heads": ("out",), "absorb": ("out",), "rotate_latents": ("q", "latents"),
}  # fmt: skip
GUARD = 64  # numbers on both sides of an output that no kernel may write
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
POISON = {torch.int8: 99, torch.int32: -7, torch.int64: -7}


def nightly(*cases: tuple[Any, ...]) -> list[Any]:
    """Return parameters of cases that need not run each day: what they add is covered by others in parts."""
    return [pytest.param(*case, marks=pytest.mark.nightly) for case in cases]


def on_gpu(kernel: Any, grid: tuple[int, ...], compiled: Compiled, device: str = "cuda", **arguments: Any) -> None:
    """Start a kernel on a GPU over copies of its arguments, and copy everything back."""
    given, copies = moved(arguments, device)
    launch(kernel, grid, compiled, **given)
    for own, copy in copies:
        own.copy_(copy)


def moved(arguments: Mapping[str, Any], device: str) -> tuple[dict[str, Any], list[tuple[torch.Tensor, torch.Tensor]]]:
    """Return arguments on another device, and the bytes of each array here with their copy there.

    Arrays keep their strides, and views of one array stay so: kernels get strides as numbers.
    """
    given, copies = dict(arguments), {}
    for name, argument in arguments.items():
        x = argument.base if isinstance(argument, TensorDescriptor) else argument
        if isinstance(x, torch.Tensor):
            storage = x.untyped_storage()
            if storage.data_ptr() not in copies:
                own = torch.empty(0, dtype=torch.uint8).set_(storage)
                copies[storage.data_ptr()] = own, torch.empty_like(own, device=device).copy_(own)
            there = copies[storage.data_ptr()][1].untyped_storage()
            view = torch.empty(0, dtype=x.dtype, device=device)
            given[name] = view.set_(there, x.storage_offset(), x.size(), x.stride())
            if isinstance(argument, TensorDescriptor):
                given[name] = replace(argument, base=given[name])
    return given, list(copies.values())


start = launch if IS_INTERPRETED else on_gpu


def guarded(kernel: Any, grid: tuple[int, ...], compiled: Compiled, **arguments: Any) -> None:
    """Start a kernel whose outputs are poison between guards, and check the guards afterwards."""
    given, wide = dict(arguments), {}
    states = ("after",) if arguments.get("IN_PAGES") is False else ()  # pages keep other states
    for name in (*OUTPUTS[kernel.fn.__name__], *states, *heads_of(arguments)):
        found = arguments[name]
        if found is None:
            continue
        poison = POISON.get(found.dtype, float("nan"))
        wide[name] = torch.full((found.numel() + 2 * GUARD,), poison, dtype=found.dtype)
        given[name] = wide[name][GUARD:-GUARD].view(found.shape)
    with np.errstate(invalid="ignore"):  # infinities and NaN are allowed; an overflow is an error
        start(kernel, grid, compiled, **given)
    for name, whole in wide.items():
        for side in (whole[:GUARD], whole[-GUARD:]):
            poison = POISON.get(side.dtype)
            is_kept = side.isnan().all() if poison is None else (side == poison).all()
            assert is_kept, f"{kernel.fn.__name__} wrote outside of {name}"
        arguments[name].copy_(given[name])


def heads_of(arguments: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of gates, and of keys and values that a kernel writes, unless it writes these into pages."""
    if arguments.get("FINISH", ("rows",))[0] not in ("heads", "whole heads"):
        return ()
    return "gates", *(("keys", "values") if arguments["pages"] is None else ())


def interpreted(**overrides: str) -> OpsTable:
    """Return the table of device cuda with torch's CPU tensors; overrides: as in `open_table`."""
    backends = TritonBackend(guarded), SdpaBackend(), ReferenceBackend()
    return OpsTable(TorchMemory("reference"), backends, overrides)


def reference() -> OpsTable:
    """Return the table of the definitions."""
    return OpsTable(TorchMemory("reference"), (ReferenceBackend(),))


def serves(table: OpsTable, op: Op[Any], case: object) -> bool:
    """Return whether our kernels serve an op."""
    return table.choose(op, case).backend == "triton"
