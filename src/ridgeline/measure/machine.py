"""Measure the roof of a machine: how fast it reads memory and how fast it multiplies, through its ops table.

The kernels are those that the model runs on, so the roof is the peak that this software reaches on the machine. It is
the best of many tries, because other programs make a machine look slower than it is, never faster.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from ridgeline.ops import OpsTable, api
from ridgeline.quant import store
from ridgeline.spec.hardware import HardwareSpec
from ridgeline.spec.quant import PLAIN
from ridgeline.spec.rates import Curve
from ridgeline.system import last_cache_bytes

READ_BYTES = 1 << 29  # read at least to measure the memory
BEYOND = 4  # as many times the last cache are read at least, so that it can hold a quarter of what is read
READ_WIDTH = 16_384
PART_BYTES = 1 << 26  # of one matrix: a kernel packs a copy of it, and the copy of a single one would double the memory
NEAR_BYTES, NEAR_WIDTH = (4 << 20, 16 << 20, 32 << 20, 64 << 20, 256 << 20), 1_024  # read to measure caches
SQUARES = (384, 2_048)  # matrix sizes: a CPU is fastest at products that fit its caches, a GPU at large ones
TRY_S, BUDGET_S = 0.02, 0.4  # least seconds of one try, and of all tries of one kind together
NEAR_SHARE = 0.3  # of BUDGET_S, for each of NEAR_BYTES
FLOAT = 4  # bytes


@dataclass(frozen=True, slots=True)
class Roof:
    """Peak rates of a machine: bytes read per second, and float32 operations per second; a product and sum are two.

    reads: bytes per second by the bytes that are read again and again, which caches may hold; None for a GPU.
    """

    read_bytes_per_s: float
    flops_per_s: float
    reads: Curve | None = None

    def hardware(self, *, memory_bytes: int, on_host: bool) -> HardwareSpec:
        """Return the machine for cost/roofline.py. on_host: whether the device computes in the host's memory."""
        said = "measured at the start"
        return HardwareSpec(
            "this machine", memory_bytes, self.read_bytes_per_s, {"float32": self.flops_per_s},
            kind="cpu" if on_host else "gpu", sources={"bandwidth": said, "operations": said}, reads=self.reads,
        )  # fmt: skip


def measure_roof(table: OpsTable) -> Roof:
    """Measure the peak rates. Takes two seconds.

    It uses 512 MiB, or four times the last cache if that is more, but at most a quarter of the free memory.
    """
    free, wanted = table.memory.free_bytes(), max(READ_BYTES, BEYOND * last_cache_bytes())
    size = wanted if free is None else min(wanted, free // 4)
    rate = _read_rate(table, size, READ_WIDTH)
    products = (_calls_per_s(table, rows=n, out=n, width=n) * 2 * n**3 for n in SQUARES)
    return Roof(rate, max(products), _near_rates(table, size, rate) if table.memory.on_host else None)


def _near_rates(table: OpsTable, size: int, rate: float) -> Curve:
    """Return the bytes per second by the bytes read, up to `size`, where it is `rate`. Fewer bytes are never slower."""
    sizes = [n for n in NEAR_BYTES if n < size]
    found = [_read_rate(table, n, NEAR_WIDTH, BUDGET_S * NEAR_SHARE) for n in sizes]
    rates = list(accumulate([rate, *reversed(found)], max))[::-1]
    return Curve(tuple(map(float, (*sizes, size))), tuple(rates))


def _read_rate(table: OpsTable, size: int, width: int, budget_s: float | None = None) -> float:
    parts = -(-size // PART_BYTES)
    rows = max(size // (FLOAT * width * parts), 1)
    calls = _calls_per_s(table, rows=1, out=rows, width=width, parts=parts, budget_s=budget_s)
    return calls * FLOAT * rows * width * parts


def _calls_per_s(
    table: OpsTable, *, rows: int, out: int, width: int, parts: int = 1, budget_s: float | None = None
) -> float:
    """Return how often the device multiplies a matrix [rows, width] with each of `parts` matrices [out, width] per
    second, at best.

    budget_s: seconds of all tries; default: BUDGET_S.
    """
    memory, take = table.memory, table.primitive(api.TAKE)
    x = memory.put(np.ones((rows, width), np.float32), "float32", "float32")
    matrices = []
    for _ in range(parts):
        matrix = store(memory.put(np.ones((out, width), np.float32), "float32", "float32"), None, table, PLAIN)
        matrix.prepare()
        matrices.append(matrix)
    first = memory.integers(np.zeros(1, np.int64))

    def run(calls: int) -> float:
        start = time.perf_counter()
        for _ in range(calls):
            for matrix in matrices:
                y = matrix.apply(x)
        memory.get(take(y, first))  # wait: a device computes asynchronously until a result is read
        return time.perf_counter() - start

    return _best(run, budget_s or BUDGET_S)


def _best(run: Callable[[int], float], budget_s: float) -> float:
    """Return the calls per second of the best try. run: returns the seconds that a number of calls take."""
    run(1)  # the first call prepares weights and buffers, so it is not measured
    calls, begin, best = 1, time.perf_counter(), 0.0
    while time.perf_counter() - begin < budget_s or not best:
        seconds = run(calls)
        if seconds < TRY_S:
            calls *= 2  # too short to be measured
        else:
            best = max(best, calls / seconds)
    return best
