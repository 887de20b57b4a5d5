"""The cpu backend: ops that the kernels of csrc/ serve. The numpy backend serves the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ridgeline._kernels import Pool
from ridgeline.ops import api
from ridgeline.ops.api import Op, Weights
from ridgeline.ops.cpu.blocks import BLOCKS
from ridgeline.ops.cpu.matrices import refuses_weights
from ridgeline.ops.cpu.primitives import KERNELS
from ridgeline.ops.cpu.stages import FUSED

STAGES = {**FUSED, **BLOCKS}
_PRODUCT = "is a product of two arrays of the step, as numpy computes it"
_MOVES = (
    api.SPLIT_HEADS, api.CUT, api.GATHER, api.SPLIT,
)  # fmt: skip


class CpuBackend:
    """Kernels over numpy arrays, on the threads of a pool."""

    name = "cpu"

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    def refuses(self, op: Op[Any], case: object) -> str | None:
        if op in KERNELS:
            return KERNELS[op].refuses(case)
        if op in STAGES:
            return STAGES[op].refuses(case)
        if op is api.MIX:
            return _PRODUCT
        return "moves numbers only, as numpy does" if op in _MOVES else "is part of a fused kernel"

    def refuses_weights(self, op: Op[Any], weights: Weights) -> str | None:
        return refuses_weights(op, weights)

    def primitive(self, op: Op[Any], case: object) -> Callable[..., Any]:
        return KERNELS[op].make(case, self._pool)

    def stage(self, op: Op[Any], case: object, weights: Weights) -> Callable[..., Any]:
        return STAGES[op].make(case, weights, self._pool)
