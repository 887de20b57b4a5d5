"""From a device's name to its table of kernels. Each library is imported when its device is asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ridgeline.errors import DeviceError
from ridgeline.ops.table import OpsTable


@dataclass(frozen=True, slots=True)
class Device:
    """One thing that can run a model."""

    name: str  # cpu, cuda, cuda:1, ...
    description: str


def devices() -> tuple[Device, ...]:
    """The devices of this machine, best first."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    gpus = (Device(f"cuda:{i}", torch.cuda.get_device_name(i)) for i in range(count))
    return (*gpus, Device("cpu", f"{torch.get_num_threads()} threads"))


def resolve_device(name: str) -> str:
    """`auto`, `cpu`, `cuda` or `cuda:N` as a device that is there. Raises DeviceError, naming those that are."""
    available = [d.name for d in devices()]
    wanted = {"auto": available[0], "cuda": "cuda:0"}.get(name, name)
    if wanted not in available:
        raise DeviceError(f"device {name!r} is not available; this machine has {', '.join(available)}")
    return wanted


def open_table(device: str, overrides: Mapping[str, str] | None = None) -> OpsTable:
    """The kernels of a device that `resolve_device` returned."""
    from ridgeline.ops.reference.backend import open_reference

    memory, backends = open_reference(device)
    return OpsTable(memory, backends, overrides)


def host_free_bytes() -> int | None:
    """Memory of this machine that programs can take without swapping, None where the system does not say."""
    path = Path("/proc/meminfo")
    lines = path.read_text().splitlines() if path.exists() else []
    found = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    return found[0] if found else None
