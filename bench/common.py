"""Describe the machine of a benchmark, and write the JSON line that each benchmark prints."""

from __future__ import annotations

import json
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ridgeline.measure.calibrate import read_sizes
from ridgeline.system import free_bytes, last_cache_bytes


def emit(case: str, gate: bool, **values: Any) -> dict[str, Any]:
    """Print one JSON line: commit, machine, case, correctness gate, values."""
    line = {"commit": commit(), "machine": machine(), "case": case, "correct": gate, **values}
    print(json.dumps(line), flush=True)
    return line


def beyond_caches() -> int:
    """Return the bytes over which the speed of memory is measured, as `ridgeline calibrate` does."""
    return read_sizes(last_cache_bytes(), free_bytes())[-1]


def commit() -> str:
    root = Path(__file__).resolve().parent.parent
    run = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=root, capture_output=True, text=True, check=False
    )
    return run.stdout.strip() or "unknown"


def machine() -> str:
    info = Path("/proc/cpuinfo")
    names = [line.split(":")[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
    return f"{names[0]} x {len(names)}" if names else platform.processor()


def median_seconds(run: Callable[[], Any], rounds: int) -> float:
    """Return the median time of `rounds` runs, in seconds."""
    return statistics.median(seconds(run) for _ in range(rounds))


def seconds(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def peak_flops() -> float:
    """Return the operations per second of a large float32 matrix product in torch."""
    import torch

    a, b = torch.randn(2048, 2048), torch.randn(2048, 2048)
    return 2 * 2048**3 / median_seconds(lambda: a @ b, 7)
