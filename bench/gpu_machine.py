"""The device of bench/gpu.py: what it states of itself, and how runs are timed on it."""

from __future__ import annotations

import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from common import commit
from common import machine as processor

ROOT = Path(__file__).resolve().parent.parent
ROTATED = 240 << 20  # bytes that inputs take together: four times the 60 MB of a large second cache
MOST_COPIES = 128
CLOCKS = "clocks.sm,clocks.mem,temperature.gpu,power.draw"
SAMPLES, SAMPLED_S = 40, 0.4  # least of both ends the measurement of a case
Run = Callable[[], Any]


class Times(NamedTuple):
    """Seconds of one run, in samples; and why they were not taken by replaying a graph, or None."""

    seconds: Sequence[float]
    no_graph: str | None

    def spread(self) -> list[float]:
        """Return the median and the 10th and 90th percentile."""
        return [float(value) for value in np.percentile(self.seconds, [50, 10, 90])]


class Gpu:
    """A GPU. Runs are replayed as one CUDA graph, so that the host's work is not part of a small kernel's time."""

    is_small = False

    def __init__(self) -> None:
        self.device = torch.device("cuda", 0)
        self.name = torch.cuda.get_device_name(self.device)
        self.engine_device = "cuda:0"

    def clocks(self) -> Mapping[str, str] | None:
        """Return clocks in MHz, the temperature and the power now; None without nvidia-smi."""
        command = ["nvidia-smi", "--id=0", f"--query-gpu={CLOCKS}", "--format=csv,noheader,nounits"]
        try:
            found = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
        except (OSError, subprocess.SubprocessError):
            return None
        return dict(zip(CLOCKS.split(","), map(str.strip, found.split(",")), strict=True))

    def copies(self, num_bytes: float) -> int:
        """Return how many different inputs of so many bytes are used in turn."""
        return int(min(MOST_COPIES, max(2, -(-ROTATED // max(num_bytes, 1)))))

    def timed(self, runs: Sequence[Run]) -> Times:
        """Time runs of equal work over different inputs."""
        for run in (*runs[:2], *runs[:1]):  # compilation and lazy loading must not happen inside of a graph
            run()
        torch.cuda.synchronize()
        replay, no_graph = self._graph(runs)
        replay()
        samples: list[float] = []
        began = time.perf_counter()
        while len(samples) < SAMPLES and (len(samples) < 5 or time.perf_counter() - began < SAMPLED_S):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            replay()
            end.record()
            end.synchronize()
            samples.append(start.elapsed_time(end) / 1e3 / len(runs))
        return Times(samples, no_graph)

    def _graph(self, runs: Sequence[Run]) -> tuple[Run, str | None]:
        """Return one run of all, as a graph where they can be recorded, and why they cannot."""

        def run_all() -> None:
            for run in runs:
                run()

        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                run_all()
        except RuntimeError as e:
            torch.cuda.synchronize()
            return run_all, one_line(e)
        return graph.replay, None

    def finish(self) -> None:
        """Wait for the device."""
        torch.cuda.synchronize()

    def profiled(self) -> Any:
        """Return torch's activity that has the device's kernels."""
        return torch.profiler.ProfilerActivity.CUDA

    def free(self) -> None:
        torch.cuda.empty_cache()


class Interpreter:
    """This machine's CPU instead of a GPU: kernels run in Triton's interpreter over tiny shapes.

    Its times say nothing. It exists so that the first run on a GPU has no error of the harness.
    """

    is_small = True

    def __init__(self) -> None:
        sys.path.append(str(ROOT / "tests"))
        from interpreted.mended import mend

        mend()
        np.seterr(all="ignore")  # arrays are NaN before kernels fill them
        self.device = torch.device("cpu")
        self.name = f"Triton's interpreter on {processor()}"
        self.engine_device = "reference"

    def clocks(self) -> Mapping[str, str] | None:
        return None

    def copies(self, num_bytes: float) -> int:
        return 2

    def timed(self, runs: Sequence[Run]) -> Times:
        samples = []
        for run in runs:
            start = time.perf_counter()
            run()
            samples.append(time.perf_counter() - start)
        return Times(samples, "a CPU has no graphs")

    def finish(self) -> None:
        pass

    def profiled(self) -> Any:
        return torch.profiler.ProfilerActivity.CPU

    def free(self) -> None:
        pass


Machine = Gpu | Interpreter


@contextmanager
def poisoned() -> Iterator[None]:
    """Fill every new array with NaN, or with the largest number of its type."""
    before = torch.are_deterministic_algorithms_enabled()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before)


def version() -> str:
    """Return the commit, and a digest of the sources where files differ from it or git is missing."""
    found = commit()
    if found != "unknown" and not found.endswith("-dirty"):
        return found
    digest = blake2b(digest_size=4)
    for path in sorted((ROOT / "src").rglob("*.py")):
        digest.update(path.read_bytes())
    return f"{found.removesuffix('-dirty')}+{digest.hexdigest()}"


def one_line(error: BaseException) -> str:
    """Return an error as one short line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def idle_share(intervals: Sequence[tuple[float, float]]) -> float:
    """Return the share of the time from the first begin to the last end in which no interval runs."""
    busy, end = 0.0, float("-inf")
    for begin, stop in sorted(intervals):
        busy += max(0.0, stop - max(begin, end))
        end = max(end, stop)
    span = end - min(begin for begin, _ in intervals)
    return 1 - busy / span if span > 0 else 0.0
