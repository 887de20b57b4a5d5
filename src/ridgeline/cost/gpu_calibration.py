"""Store the ceilings of a GPU that `ridgeline calibrate` measured, and read them for the planner.

There is one file for each GPU: its name, its driver, torch, triton, and the version of Ridgeline. Any other file is
ignored.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from hashlib import blake2b
from importlib.metadata import version
from pathlib import Path

from ridgeline.spec.folders import cache_folder, write_whole
from ridgeline.spec.hardware import HardwareSpec, Link

FORMAT = 1  # format of the files; it increases when the meaning of a field changes
GPU_REMEDY = "run `ridgeline calibrate --device cuda`, which measures it in half a minute"
MEASURED_CEILINGS = (
    "times are the roofline of measured ceilings, with the time of a CUDA graph and of each of its kernels; nobody has "
    "compared them with a run yet"
)
SLICES = 2  # products of bfloat16 that stand for one product of a matrix with exact activations (docs/gpu.md)


@dataclass(frozen=True, slots=True)
class GpuRates:
    """Measured ceilings of a GPU.

    Args:
        memory_bytes: Size of its memory.
        copy_bytes_per_s: Bytes per second that a copy reads and writes together.
        flops_per_s: Operations per second of torch's products by type of the operands; a product and its sum are two.
        launch_s: Seconds of a small kernel that the host starts.
        node_s: Seconds of a small kernel in a CUDA graph.
        graph_s: Seconds of starting a graph and waiting for it, besides its kernels.
        to_device_bytes_per_s, from_device_bytes_per_s: Rates of copies from and to pinned host memory.
    """

    memory_bytes: int
    copy_bytes_per_s: float
    flops_per_s: Mapping[str, float]
    launch_s: float
    node_s: float
    graph_s: float
    to_device_bytes_per_s: float
    from_device_bytes_per_s: float


@dataclass(frozen=True, slots=True)
class GpuCalibration:
    """Results of one calibration.

    machine: the facts that it depends on. date: the day of the measurement, ISO 8601. seconds: how long it took.
    missing: types of products that were not measured, with the reason.
    """

    machine: Mapping[str, str]
    rates: GpuRates
    date: str
    seconds: float
    missing: Mapping[str, str] = field(default_factory=dict)


def gpu_path(machine: Mapping[str, str]) -> Path:
    """Return the path of a GPU's calibration. machine: the facts that it depends on."""
    facts = {**machine, "ridgeline": version("ridgeline")}
    name = blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=8).hexdigest()
    return cache_folder() / "calibration" / f"gpu-{name}.json"


def save_gpu(found: GpuCalibration) -> Path:
    """Write a calibration as a whole, and return its path. Raises OSError if it cannot be written."""
    path = gpu_path(found.machine)
    write_whole(path, json.dumps({"format": FORMAT, **asdict(found)}, indent=1))
    return path


def load_gpu(machine: Mapping[str, str]) -> GpuCalibration | None:
    """Return the calibration of a GPU; None if there is none, or if the file is not valid."""
    try:
        value = json.loads(gpu_path(machine).read_text(encoding="utf-8"))
        if value.pop("format") != FORMAT or value["machine"] != dict(machine):
            return None
        found = GpuCalibration(**{**value, "rates": GpuRates(**value["rates"])})
        machine_of_gpu(found)  # raises ValueError for rates that are not positive
        return found
    except (OSError, ValueError, TypeError, LookupError, AttributeError):
        return None


def machine_of_gpu(found: GpuCalibration) -> HardwareSpec:
    """Return a GPU as it was measured: a roofline with measured ceilings, and the time of kernels and of a step.

    Products with exact activations are two products of bfloat16, so float32 has half of their rate.
    """
    rates, said = found.rates, f"measured by ridgeline calibrate on {found.date}"
    return HardwareSpec(
        name=found.machine["gpu"],
        memory_bytes=rates.memory_bytes,
        read_bytes_per_s=rates.copy_bytes_per_s,
        flops_per_s={**rates.flops_per_s, "float32": rates.flops_per_s["bfloat16"] / SLICES},
        link=Link("copies through the host", rates.to_device_bytes_per_s, rates.launch_s, said),
        op_overhead_s=rates.node_s,
        step_overhead_s=rates.graph_s,
        kind="gpu",
        host=Link("copies from the host", rates.to_device_bytes_per_s, 0.0, said),
        sources={"memory": "as the driver reports", "bandwidth": f"copying, {said}", "operations": said, "link": said},
    )


def calibrated_gpu(machine: Mapping[str, str]) -> tuple[HardwareSpec | None, str]:
    """Return a GPU as it was measured, and a line that says how far its times can be trusted.

    Where it is not calibrated, return None, and a line with the remedy.
    """
    found = load_gpu(machine)
    if found is None:
        return None, f"no prediction: {machine['gpu']} is not calibrated; {GPU_REMEDY}"
    return machine_of_gpu(found), f"{machine['gpu']}, calibrated on {found.date}: {MEASURED_CEILINGS}"
