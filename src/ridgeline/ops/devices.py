"""Open the table of kernels of a device. A device's library is imported when the device is opened."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING

from ridgeline.errors import DeviceError
from ridgeline.ops.table import CPU, GPU_BACKEND, NO_KERNEL, REFERENCE, OpsTable
from ridgeline.system import gpu_driver, num_cores

if TYPE_CHECKING:
    from ridgeline.ops.torchlib.probe import GpuProbe


@dataclass(frozen=True, slots=True)
class Device:
    """A device that can run a model."""

    name: str  # cpu, reference, cuda:0, cuda:1, ...
    description: str


def devices() -> tuple[Device, ...]:
    """Return the devices of this machine, best first. torch is imported only where a GPU driver is installed."""
    found = [*_gpus(), Device(CPU, f"numpy arrays, {num_cores()} cores")]
    if has_torch():
        found.append(Device(REFERENCE, "torch on the CPU: the definition of every op, with gradients"))
    return tuple(found)


def resolve_device(name: str) -> str:
    """Return the device that `auto`, `cpu`, `reference`, `cuda` or `cuda:N` stands for on this machine.

    Raises DeviceError for a device that is not available, with those that are or with what to install.
    """
    if name.partition(":")[0] in ("cuda", REFERENCE):
        require_torch(f"device {name!r}")
    if name in (CPU, REFERENCE):
        return name
    available = [d.name for d in devices()]
    wanted = {"auto": available[0], "cuda": "cuda:0"}.get(name, name)
    if wanted not in available:
        raise DeviceError(f"device {name!r} is not available; this machine has {', '.join(available)}")
    return wanted


def training_device(name: str) -> str:
    """Return the device for training, which needs gradients: `auto` is a GPU if there is one, else `reference`."""
    require_torch("training")
    device = resolve_device(name)
    if device == CPU and name == "auto":
        return REFERENCE
    if device == CPU:
        raise DeviceError("device 'cpu' computes no gradients; on a CPU train with --device reference")
    return device


def open_table(
    device: str, overrides: Mapping[str, str] | None = None, threads: int | None = None, *, exact: bool = False
) -> OpsTable:
    """Return the kernels of a device that `resolve_device` returned.

    Args:
        overrides: backend by op name, for diagnosis.
        threads: number of threads for the kernels of `cpu`. Default: the number of usable physical cores.
        exact: compute in float64 on `reference`. torch's float32 products depend on the batch, by enough to change a
            close decision between two tokens. Training uses float32. Other devices always compute in float32.

    Raises:
        DeviceError: for more threads than CPUs, for threads on a device without our kernels, and for an override that
            names no op or backend.
    """
    if threads is not None:
        _check_threads(device, threads)
    if device == CPU:
        from ridgeline.ops.host.backend import open_host

        memory, backends, driver = open_host(threads)
        return OpsTable(memory, backends, overrides, driver)
    if device != REFERENCE and has_triton():
        from ridgeline.ops.triton.backend import open_gpu

        memory, backends, driver = open_gpu(device, overrides or {})
        return OpsTable(memory, backends, overrides, driver)
    from ridgeline.ops.reference.backend import open_reference

    return OpsTable(*open_reference(device, exact=exact and device == REFERENCE), overrides)


def threads_of(device: str, given: int | None, sharing: int, most: int | None = None) -> int | None:
    """Return the threads of one of `sharing` engines on a device; None where the device chooses.

    given: the number that the user set for each engine, if any. most: the largest number for each engine otherwise.
    """
    if given is not None or (sharing == 1 and most is None):
        return given
    if resolve_device(device) != CPU or find_spec("ridgeline._kernels") is None:
        return None
    from ridgeline._kernels import usable_cores

    usable = usable_cores()
    own = min(max(1, usable // sharing), most or usable)
    return None if own == usable else own


def _check_threads(device: str, threads: int) -> None:
    if device != CPU or find_spec("ridgeline._kernels") is None:
        why = (
            "the extension with its kernels is missing (see ridgeline doctor)" if device == CPU else "torch has its own"
        )
        raise DeviceError(
            f"threads is {threads}, which device {device!r} does not support: {why}; do not set --threads"
        )
    if type(threads) is not int or not 1 <= threads <= num_cores():
        raise DeviceError(
            f"threads is {threads!r}; set --threads from 1 to {num_cores()}, the CPUs that this process may use"
        )


KERNELS_COST = "numpy serves every op of device cpu: its answers are right, and several times slower"
KERNELS_REMEDY = "install a C++20 compiler, then install Ridgeline again"

GPU_KERNELS_COST = "the definitions of the ops serve device cuda: their answers are right, and many times slower"
LARGE_OPS = "expert_block", "recurrent_block"  # of those without any kernel
GPU_KERNELS_REMEDY = "pip install 'ridgeline[gpu]'"


def missing_kernels(device: str) -> tuple[str, ...]:
    """Return one line with the cost of missing kernels and the remedy; () where the device has its kernels."""
    if device.startswith("cuda") and not has_triton():
        return (f"the kernels for GPUs are missing: {GPU_KERNELS_COST}; {GPU_KERNELS_REMEDY}",)
    if device != CPU or find_spec("ridgeline._kernels") is not None:
        return ()
    return (f"the kernels for this CPU are missing: {KERNELS_COST}; {KERNELS_REMEDY} (ridgeline doctor says more)",)


def served_by_definitions(table: OpsTable) -> tuple[str, ...]:
    """Return one line for each op that the definitions serve on a GPU: the op, the reason and the remedy.

    Small ops that never have a kernel are left out, because every model has them.
    """
    if not table.memory.device.startswith("cuda"):
        return ()
    found: dict[tuple[str, str], None] = {}
    for choice in table.choices():
        reason = dict(choice.refusals).get(GPU_BACKEND)
        is_small = reason == NO_KERNEL and choice.op not in LARGE_OPS
        if choice.backend != GPU_BACKEND and reason and not is_small and not reason.startswith("overridden"):
            found[choice.op, reason] = None
    return tuple(
        f"no kernel for GPUs serves this model's {op}: {reason}; its definition is right, and many times slower "
        f"(--ops {op}=BACKEND selects a backend)"
        for op, reason in found
    )


def has_torch() -> bool:
    """Return whether torch is installed, without importing it."""
    return find_spec("torch") is not None


def has_triton() -> bool:
    """Return whether triton, which compiles the kernels for GPUs, is installed, without importing it."""
    return find_spec("triton") is not None


def require_torch(what: str) -> None:
    """Raise DeviceError if torch, which `what` needs, is not installed."""
    if not has_torch():
        raise DeviceError(f"{what} needs torch: pip install 'ridgeline[torch]'")


def gpu_facts(device: str) -> dict[str, str]:
    """Return the facts about a GPU that its calibration depends on; `gpu` is its name."""
    from ridgeline.ops.torchlib import probe

    return probe.gpu_facts(device)


def gpu_probe(device: str) -> GpuProbe:
    """Return what times a GPU for its calibration."""
    from ridgeline.ops.torchlib import probe

    return probe.GpuProbe(device)


def first_gpu() -> dict[str, str] | None:
    """Return the facts about the first GPU; None without one. torch is imported only where a driver is installed."""
    found = _gpus()
    return gpu_facts(found[0].name) if found else None


def _gpus() -> tuple[Device, ...]:
    if not has_torch() or not gpu_driver():
        return ()
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return tuple(Device(f"cuda:{i}", torch.cuda.get_device_name(i)) for i in range(count))
