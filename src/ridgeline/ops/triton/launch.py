"""How kernels are started."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, NamedTuple, Protocol
from weakref import WeakValueDictionary

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


class Counters:
    """Counters of programs by their number. They are zeros between launches."""

    def __init__(self) -> None:
        self._kept: dict[int, torch.Tensor] = {}

    def __call__(self, count: int, device: torch.device) -> torch.Tensor:
        """Return so many counters. A recorded step keeps their address, so that each number has counters of its own."""
        if count not in self._kept:
            self._kept[count] = torch.zeros(count, dtype=torch.int32, device=device)
        return self._kept[count]


class CountingLaunch:
    """Starts kernels, and knows their counters.

    A kernel whose programs compute parts of one result counts those that have ended, in its arguments `arrived` and
    `finished`. The last program sets the counter to zero again. A launch that fails leaves it as it is, until `reset`.
    """

    def __init__(self, start: Launch = launch) -> None:
        self._start, self._counters = start, WeakValueDictionary[int, torch.Tensor]()

    def __call__(self, kernel: Any, grid: tuple[int, ...], compiled: Compiled, **arguments: Any) -> None:
        for counters in (arguments.get("arrived"), arguments.get("finished")):
            if counters is not None:
                self._counters[id(counters)] = counters
        self._start(kernel, grid, compiled, **arguments)

    def reset(self) -> None:
        """Set all counters to zero."""
        for counters in list(self._counters.values()):
            counters.zero_()
