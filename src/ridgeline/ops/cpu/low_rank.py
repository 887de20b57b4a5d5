"""The low-rank terms of adapters, by a kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ridgeline import _kernels
from ridgeline._kernels import Pool
from ridgeline.ops import api
from ridgeline.ops.api import SlotTerms
from ridgeline.ops.cpu.kernel import Kernel, Kernels, empty, never
from ridgeline.ops.cpu.matrices import Floats

Ints = np.ndarray[Any, np.dtype[np.int64]]


def add_terms(case: None, pool: Pool) -> Callable[[Floats, Floats, Ints, SlotTerms], Floats]:
    def run(y: Floats, x: Floats, slots: Ints, terms: SlotTerms) -> Floats:
        out = empty(pool, *y.shape)
        own: Any = terms
        _kernels.add_low_rank(pool, y, x, slots, own.down, own.up, own.gain, own.add, own.ranks, out)
        return out

    return run


KERNELS: Kernels = {api.ADD_TERMS: Kernel(never, add_terms)}
