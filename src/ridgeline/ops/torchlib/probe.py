"""Timings of a GPU by torch's own operations, for `ridgeline calibrate`."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from importlib import metadata

import torch
from torch import Tensor

WARM, TIMES = 3, 12
SMALL = 256  # numbers that a small kernel writes
LAUNCHES = 200
FP8_OF, INT8_OF = torch.float8_e4m3fn, torch.int8
MULTIPLY: Mapping[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor, Tensor, Tensor], Tensor]]] = {
    "bfloat16": (lambda x: x.bfloat16(), lambda a, b, one: a @ b.T),
    "float16": (lambda x: x.half(), lambda a, b, one: a @ b.T),
    "fp8": (
        lambda x: x.to(FP8_OF), lambda a, b, one: torch._scaled_mm(a, b.T, one, one, out_dtype=torch.bfloat16),
    ),
    "int8": (lambda x: (x * 30).round().clamp(-127, 127).to(INT8_OF), lambda a, b, one: torch._int_mm(a, b.T)),
}  # fmt: skip


def gpu_facts(device: str) -> dict[str, str]:
    """Return the facts about a GPU that its calibration depends on."""
    found = torch.cuda.get_device_properties(device)
    return {
        "gpu": found.name, "capability": f"{found.major}.{found.minor}", "memory": str(found.total_memory),
        "processors": str(found.multi_processor_count), "cuda": str(torch.version.cuda),
        "torch": str(torch.__version__), "triton": _version("triton"),
    }  # fmt: skip


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


class GpuProbe:
    """Times a GPU; a `measure.gpu.Probe`. Every time is in seconds, and a median."""

    def __init__(self, device: str) -> None:
        self._device = torch.device(device)

    def memory_bytes(self) -> int:
        return int(torch.cuda.get_device_properties(self._device).total_memory)

    def copy_s(self, num_bytes: int) -> float:
        """Return the time of copying, which reads and writes `num_bytes` each."""
        source = self._noise(num_bytes // 4)
        target = torch.empty_like(source)
        return self._seconds(lambda: target.copy_(source))

    def product_s(self, kind: str, size: int) -> float | str:
        """Return the time of a product of two square matrices of a type, or why torch has none on this GPU."""
        narrow, multiply = MULTIPLY[kind]
        a, b, one = narrow(self._noise(size, size)), narrow(self._noise(size, size)), self._noise(1)[0] * 0 + 1
        try:
            return self._seconds(lambda: multiply(a, b, one))
        except (RuntimeError, ValueError) as e:
            return " ".join(str(e).split())[:200]

    def launch_s(self) -> float:
        """Return the time of a small kernel that the host starts."""
        x = self._noise(SMALL)

        def run() -> None:
            for _ in range(LAUNCHES):
                x.add_(1.0)

        return self._seconds(run) / LAUNCHES

    def graph_s(self, nodes: int) -> float:
        """Return the time of a graph of so many small kernels, one after the other."""
        x = self._noise(SMALL)
        graph = torch.cuda.CUDAGraph()
        x.add_(1.0)
        with torch.cuda.graph(graph):
            for _ in range(nodes):
                x.add_(1.0)
        return self._seconds(graph.replay)

    def host_copy_s(self, num_bytes: int, *, to_device: bool) -> float:
        """Return the time of a copy from pinned host memory, or to it."""
        host = torch.empty(num_bytes // 4).pin_memory()
        there = self._noise(num_bytes // 4)
        if to_device:
            return self._seconds(lambda: there.copy_(host, non_blocking=True))
        return self._seconds(lambda: host.copy_(there, non_blocking=True))

    def _noise(self, *shape: int) -> Tensor:
        generator = torch.Generator(self._device).manual_seed(0)
        return torch.randn(shape, generator=generator, device=self._device)

    def _seconds(self, run: Callable[[], object]) -> float:
        for _ in range(WARM):
            run()
        found = []
        with torch.cuda.device(self._device):
            for _ in range(TIMES):
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                run()
                end.record()
                end.synchronize()
                found.append(start.elapsed_time(end) / 1e3)
        return statistics.median(found)
