"""How kernels are started."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, NamedTuple, Protocol

import torch


class Compiled(NamedTuple):
    """Options of compilation. No product and sum are fused unless a kernel says so: fused ones have other bits."""

    warps: int
    stages: int = 1


class Launch(Protocol):
    """Starts kernels; tests replace it to count launches and to compile what would be launched."""

    def __call__(self, kernel: Any, grid: tuple[int, ...], compiled: Compiled, **arguments: Any) -> None: ...


def launch(kernel: Any, grid: tuple[int, ...], compiled: Compiled, **arguments: Any) -> None:
    """Start a kernel on the GPU that holds its arguments, on torch's current stream there."""
    device = next(x.device for x in arguments.values() if isinstance(x, torch.Tensor))
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        kernel[grid](**arguments, num_warps=compiled.warps, num_stages=compiled.stages, enable_fp_fusion=False)
