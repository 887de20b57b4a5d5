"""Measure the roof of a machine: how fast it reads memory and how fast it multiplies, through its ops table.

The kernels are those that the model runs on, so the roof is the peak that this software reaches on the machine. It is
the best of many tries, because other programs make a machine look slower than it is, never faster.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ridgeline.ops import OpsTable, api
from ridgeline.quant import store
from ridgeline.spec.hardware import HardwareSpec
from ridgeline.spec.quant import PLAIN

READ_BYTES = 1 << 29  # much larger than any cache
READ_WIDTH = 16_384
SQUARES = (384, 2_048)  # matrix sizes: a CPU is fastest at products that fit its caches, a GPU at large ones
TRY_S, BUDGET_S = 0.02, 0.4  # least seconds of one try, and of all tries of one kind together
FLOAT = 4  # bytes


@dataclass(frozen=True, slots=True)
class Roof:
    """Peak rates of a machine: bytes read per second, and float32 operations per second; a product and sum are two."""

    read_bytes_per_s: float
    flops_per_s: float

    def hardware(self, *, memory_bytes: int, on_host: bool) -> HardwareSpec:
        """Return the machine for cost/roofline.py. on_host: whether the device computes in the host's memory."""
        said = "measured at the start"
        return HardwareSpec(
            "this machine", memory_bytes, self.read_bytes_per_s, {"float32": self.flops_per_s},
            kind="cpu" if on_host else "gpu", sources={"bandwidth": said, "operations": said},
        )  # fmt: skip


def measure_roof(table: OpsTable) -> Roof:
    """Measure the peak rates. Takes about a second, and a quarter of the free memory but at most 512 MiB."""
    free = table.memory.free_bytes()
    size = READ_BYTES if free is None else min(READ_BYTES, free // 4)
    rows = max(size // (FLOAT * READ_WIDTH), 1)
    reads = _calls_per_s(table, rows=1, out=rows, width=READ_WIDTH)
    products = (_calls_per_s(table, rows=n, out=n, width=n) * 2 * n**3 for n in SQUARES)
    return Roof(reads * FLOAT * rows * READ_WIDTH, max(products))


def _calls_per_s(table: OpsTable, *, rows: int, out: int, width: int) -> float:
    """Return how many products of [rows, width] and [out, width] matrices the device computes per second, at best."""
    memory, take = table.memory, table.primitive(api.TAKE)
    x, weight = (memory.put(np.ones((n, width), np.float32), "float32", "float32") for n in (rows, out))
    matrix = store(weight, None, table, PLAIN)
    matrix.prepare()
    first = memory.integers(np.zeros(1, np.int64))

    def run(calls: int) -> float:
        start = time.perf_counter()
        for _ in range(calls):
            y = matrix.apply(x)
        memory.get(take(y, first))  # wait: a device computes asynchronously until a result is read
        return time.perf_counter() - start

    return _best(run)


def _best(run: Callable[[int], float]) -> float:
    """Return the calls per second of the best try. run: returns the seconds that a number of calls take."""
    run(1)  # the first call prepares weights and buffers, so it is not measured
    calls, begin, best = 1, time.perf_counter(), 0.0
    while time.perf_counter() - begin < BUDGET_S or not best:
        seconds = run(calls)
        if seconds < TRY_S:
            calls *= 2  # too short to be measured
        else:
            best = max(best, calls / seconds)
    return best
