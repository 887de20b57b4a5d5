"""This machine's ceilings and overheads, in seconds of measuring; see cost/calibration.py for what is kept of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ridgeline.measure.machine import BEYOND
from ridgeline.measure.passes import BYTES, TYPES, attention_passes, best_s, far_shares, product_passes
from ridgeline.measure.probes import PROBES, Sample, fit
from ridgeline.ops import OpsTable, open_table
from ridgeline.spec.rates import Curve, Passes, Rates, least
from ridgeline.system import free_bytes, last_cache_bytes

SIZES = (1 << 20, 4 << 20, 16 << 20, 64 << 20, 256 << 20)
COPY_SIZES = SIZES[1:]
STATES = ("float32", "bfloat16", "float16", "int8", "fp8")
ROUNDS = 2
PARTS = ROUNDS * (len(TYPES) + len(STATES) + len(PROBES)) + 3  # that `on_part` is told of
DEVICE = "cpu"
MEMORY, ATTENTION = "memory", "attention-"
PART_NAMES = (MEMORY, *TYPES, *(ATTENTION + state for state in STATES))  # what may be measured again alone
REFERENCES = 5  # tries of the computation that shows the processor's speed


@dataclass(frozen=True, slots=True)
class Measured:
    """rates; what the terms among them were fitted to; how long it all took; speed_change as in Calibration."""

    rates: Rates
    samples: tuple[Sample, ...]
    seconds: float
    speed_change: float


def measure_rates(on_part: Callable[[], None] = lambda: None) -> Measured:
    """Return all rates of device cpu with a thread for each core. Raises DeviceError where there is no kernel."""
    begin = time.perf_counter()
    before = _reference_s()
    isa, read, threads = _read_rates()
    on_part()
    table = open_table(DEVICE)
    rates = Rates(threads, isa, read, {str(threads): _copy_rates()}, Curve((1.0,), (1.0,)), {}, {})
    on_part()
    rates = replace(rates, far=far_shares(table))
    on_part()
    rates = _passes(rates, table, on_part)
    terms, samples = fit(rates, DEVICE, ROUNDS, on_part)
    seconds = time.perf_counter() - begin
    return Measured(replace(rates, terms=terms), tuple(samples), seconds, _reference_s() / before - 1)


def measure_parts(kept: Rates, parts: Sequence[str], on_part: Callable[[], None] = lambda: None) -> Measured:
    """Return the rates with some of them measured again. parts: names of PART_NAMES.

    The terms of a step stay: they were fitted to steps of all probes. Raises DeviceError where there is no kernel.
    """
    begin, before = time.perf_counter(), _reference_s()
    table, rates = open_table(DEVICE), kept
    for part in parts:
        rates = _measured_again(part, rates, table)
        on_part()
    return Measured(rates, (), time.perf_counter() - begin, _reference_s() / before - 1)


def _measured_again(part: str, rates: Rates, table: OpsTable) -> Rates:
    if part == MEMORY:
        _, read, threads = _read_rates()
        return replace(rates, read=read, copy={str(threads): _copy_rates()}, far=far_shares(table))
    if part in TYPES:
        found = product_passes(table, part)
        number_s = BYTES[part] / rates.read[str(rates.threads)].values[-1]
        found = Passes(found.near, read_at_least(found.far, number_s))
        return replace(rates, products={**rates.products, part: found})
    state = part.removeprefix(ATTENTION)
    return replace(rates, attention={**rates.attention, state: attention_passes(table, state)})


def _reference_s() -> float:
    """Return the seconds of a computation within one core's own caches, which follow the processor's clock."""
    x = np.ones((256, 256), np.float32)
    return min(best_s(lambda: x @ x) for _ in range(REFERENCES))


def _passes(rates: Rates, table: OpsTable, on_part: Callable[[], None]) -> Rates:
    """Return the best rates of some rounds: whatever else a machine does may last longer than all tries of one kind."""
    byte_s = 1 / rates.read[str(rates.threads)].values[-1]
    products: dict[str, Passes] = {}
    attention: dict[str, Passes] = {}
    for _ in range(ROUNDS):
        for kinds, found, measure in ((TYPES, products, product_passes), (STATES, attention, attention_passes)):
            for kind in kinds:
                now = measure(table, kind)
                old = found.get(kind, now)
                far = read_at_least(least(old.far, now.far), BYTES[kind] * byte_s)
                found[kind] = Passes(least(old.near, now.near), far)
                on_part()
    return replace(rates, products=products, attention=attention)


def read_at_least(far: Curve, number_s: float) -> Curve:
    """Return `far` with times that are no shorter than reading the numbers from memory takes.

    A cache that other machines share holds now and then more of what a probe reads than it will hold of a model.
    Reading is measured over more bytes than that.

    number_s: to read a number once, for as many rows as there are.
    """
    values = (max(v, number_s / rows) for v, rows in zip(far.values, far.points, strict=True))
    return Curve(far.points, tuple(values))


def read_sizes(cache_bytes: int, memory_bytes: int) -> tuple[int, ...]:
    """Return the numbers of bytes over which reading is measured: as many as a cache of `cache_bytes` holds, more than
    it holds, and at most a quarter of the free memory.
    """
    wanted = (min(n * cache_bytes, memory_bytes // 4) // SIZES[0] * SIZES[0] for n in (1, 2, BEYOND))
    return (*SIZES, *sorted({n for n in wanted if n > SIZES[-1]}))


def _read_rates() -> tuple[str, dict[str, Curve], int]:
    """Return the instruction set, the bytes per second that 1, 2, 4, ... and all threads read, and their number."""
    from ridgeline._kernels import Pool, isa, usable_cores

    most = usable_cores()
    found = {}
    for threads in sorted({1 << k for k in range(most.bit_length()) if 1 << k <= most} | {most}):
        pool = Pool(threads)
        sizes = read_sizes(last_cache_bytes(), free_bytes())
        values = tuple(pool.read_rate(size) for size in sizes)
        found[str(threads)] = Curve(tuple(map(float, sizes)), values)
    return isa(), found, most


def _copy_rates() -> Curve:
    """Return the bytes per second that are read, and as many written, by the thread that copies pages."""
    values = []
    for size in COPY_SIZES:
        source = np.ones(size, np.uint8)
        target = np.empty_like(source)
        values.append(size / best_s(lambda t=target, s=source: np.copyto(t, s)))  # type: ignore[misc]
    return Curve(tuple(map(float, COPY_SIZES)), tuple(values))
