"""The cpu backend: what the kernels of csrc/ serve. What they do not is left to numpy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ridgeline._kernels import Pool
from ridgeline.ops.api import Op, Weights
from ridgeline.ops.cpu import attention, elementwise, latent, linear, recurrent, tokens
from ridgeline.ops.cpu.kernel import Kernels
from ridgeline.ops.cpu.stages import STAGES

KERNELS: Kernels = {
    **linear.KERNELS, **attention.KERNELS, **latent.KERNELS, **recurrent.KERNELS, **elementwise.KERNELS,
    **tokens.KERNELS,
}  # fmt: skip


class CpuBackend:
    """Kernels over numpy arrays, on the threads of a pool."""

    name = "cpu"

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    def refuses(self, op: Op[Any], case: object) -> str | None:
        if op in KERNELS:
            return KERNELS[op].refuses(case)
        return STAGES[op].refuses(case) if op in STAGES else "has no kernel yet"

    def primitive(self, op: Op[Any], case: object) -> Callable[..., Any]:
        return KERNELS[op].make(case, self._pool)

    def stage(self, op: Op[Any], case: object, weights: Weights) -> Callable[..., Any]:
        return STAGES[op].make(case, weights, self._pool)
