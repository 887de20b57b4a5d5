"""Measure the ceilings of a GPU in seconds: copies, products by type, and the time of kernels and of a graph."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from ridgeline.cost.gpu_calibration import GpuRates
from ridgeline.errors import DeviceError

COPIED = (1 << 28, 1 << 30)  # bytes; the second cache of a GPU holds less than any of them
SIZES = (4096, 8192)  # of square matrices: the best rate counts
KINDS = ("bfloat16", "float16", "fp8", "int8")
NODES = (10, 210)  # kernels of two graphs, whose difference is the time of a kernel
HOST_BYTES = 1 << 28
PARTS = 3 + len(KINDS)  # that `on_part` is told of


class Probe(Protocol):
    """Times a GPU, in seconds."""

    def memory_bytes(self) -> int: ...
    def copy_s(self, num_bytes: int) -> float: ...
    def product_s(self, kind: str, size: int) -> float | str: ...
    def launch_s(self) -> float: ...
    def graph_s(self, nodes: int) -> float: ...
    def host_copy_s(self, num_bytes: int, *, to_device: bool) -> float: ...


def measure_gpu(
    probe: Probe, on_part: Callable[[], None] = lambda: None
) -> tuple[GpuRates, dict[str, str], float]:  # fmt: skip
    """Return the ceilings, the types of products that the GPU lacks with the reason, and how long it took.

    Raises DeviceError for a GPU without products of bfloat16.
    """
    begin = time.perf_counter()
    copy = max(2 * size / probe.copy_s(size) for size in COPIED)
    on_part()
    flops: dict[str, float] = {}
    missing: dict[str, str] = {}
    for kind in KINDS:
        found = [(size, probe.product_s(kind, size)) for size in SIZES]
        rates = [2 * size**3 / seconds for size, seconds in found if not isinstance(seconds, str)]
        if rates:
            flops[kind] = max(rates)
        else:
            missing[kind] = str(found[-1][1])
        on_part()
    if "bfloat16" not in flops:
        raise DeviceError(f"this GPU has no products of bfloat16, which all kernels need: {missing['bfloat16']}")
    few, many = (probe.graph_s(nodes) for nodes in NODES)
    node = max((many - few) / (NODES[1] - NODES[0]), 1e-9)
    launch = probe.launch_s()
    on_part()
    to, back = (HOST_BYTES / probe.host_copy_s(HOST_BYTES, to_device=way) for way in (True, False))
    on_part()
    rates_found = GpuRates(
        probe.memory_bytes(), copy, flops, launch, node, max(few - NODES[0] * node, 1e-9), to, back
    )  # fmt: skip
    return rates_found, missing, time.perf_counter() - begin
