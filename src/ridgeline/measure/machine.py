"""The roof of a machine: how fast its memory can be read and how fast it multiplies, measured through its ops table.

The kernels are those that the model runs on, so a roof is what this software can have of the machine. It is the best of
many tries: a machine that is busy with something else looks slower than it is, never faster.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ridgeline.ops import OpsTable, api
from ridgeline.quant import store
from ridgeline.spec.quant import PLAIN

READ_BYTES = 1 << 29  # much more than caches hold
READ_WIDTH, SQUARE = 16_384, 2_048
TRY_S, BUDGET_S = 0.02, 0.4  # one try lasts at least, and all tries of one kind together
FLOAT = 4  # bytes


@dataclass(frozen=True, slots=True)
class Roof:
    """Bytes that can be read in a second, and float32 operations that can be done; a product and its sum are two."""

    read_bytes_per_s: float
    flops_per_s: float


def measure_roof(table: OpsTable) -> Roof:
    """Takes about a second, and a quarter of the free memory, at most 512 MiB."""
    free = table.memory.free_bytes()
    size = READ_BYTES if free is None else min(READ_BYTES, free // 4)
    rows = max(size // (FLOAT * READ_WIDTH), 1)
    reads = _calls_per_s(table, rows=1, out=rows, width=READ_WIDTH)
    products = _calls_per_s(table, rows=SQUARE, out=SQUARE, width=SQUARE)
    return Roof(reads * FLOAT * rows * READ_WIDTH, products * 2 * SQUARE**3)


def _calls_per_s(table: OpsTable, *, rows: int, out: int, width: int) -> float:
    """How often a [rows, width] can be multiplied by an [out, width] matrix, at best."""
    memory, take = table.memory, table.primitive(api.TAKE)
    x, weight = (memory.put(np.ones((n, width), np.float32), "float32", "float32") for n in (rows, out))
    matrix = store(weight, None, table, PLAIN)
    matrix.prepare()
    first = memory.integers(np.zeros(1, np.int64))

    def run(calls: int) -> float:
        start = time.perf_counter()
        for _ in range(calls):
            y = matrix.apply(x)
        memory.get(take(y, first))  # a device works behind the host's back until something is asked of it
        return time.perf_counter() - start

    return _best(run)


def _best(run: Callable[[int], float]) -> float:
    """Calls per second of the best try. run: seconds that so many calls take."""
    calls, begin, best = 1, time.perf_counter(), 0.0
    while time.perf_counter() - begin < BUDGET_S or not best:
        seconds = run(calls)
        if seconds < TRY_S:
            calls *= 2  # too short to be measured
        else:
            best = max(best, calls / seconds)
    return best
