"""From a device's name to its table of kernels. Each library is imported when its device is asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec

from ridgeline.errors import DeviceError
from ridgeline.ops.table import CPU, REFERENCE, OpsTable
from ridgeline.system import gpu_driver, num_cores


@dataclass(frozen=True, slots=True)
class Device:
    """One thing that can run a model."""

    name: str  # cpu, reference, cuda:0, cuda:1, ...
    description: str


def devices() -> tuple[Device, ...]:
    """The devices of this machine, best first. torch is imported only where there may be a GPU for it."""
    found = [*_gpus(), Device(CPU, f"numpy arrays, {num_cores()} cores")]
    if has_torch():
        found.append(Device(REFERENCE, "torch on the CPU: the definition of every op, with gradients"))
    return tuple(found)


def resolve_device(name: str) -> str:
    """`auto`, `cpu`, `reference`, `cuda` or `cuda:N` as a device that is there.

    Raises DeviceError, naming those that are, or what to install.
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
    """The same for training, which needs gradients: `auto` is a GPU or else `reference`."""
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
    """The kernels of a device that `resolve_device` returned.

    threads: of the kernels of `cpu`; None for one on each physical core that this process may use. exact: `reference`
    computes in float64, because torch's products in float32 depend on what else is in a batch, and by more than a close
    decision between two tokens bears; without it, for training, in float32. The other devices compute in float32.
    Raises DeviceError for more threads than there are CPUs, and where there are no such kernels.
    """
    if threads is not None:
        _check_threads(device, threads)
    if device == CPU:
        from ridgeline.ops.host.backend import open_host

        memory, backends, driver = open_host(threads)
        return OpsTable(memory, backends, overrides, driver)
    from ridgeline.ops.reference.backend import open_reference

    return OpsTable(*open_reference(device, exact=exact and device == REFERENCE), overrides)


def _check_threads(device: str, threads: int) -> None:
    if device != CPU or find_spec("ridgeline._kernels") is None:
        why = "the extension with its kernels is missing (see ridgeline doctor)" if device == CPU else "it has its own"
        raise DeviceError(f"threads is {threads}, which device {device!r} cannot be told: {why}; leave --threads open")
    if type(threads) is not int or not 1 <= threads <= num_cores():
        raise DeviceError(
            f"threads is {threads!r}; this process may use {num_cores()} CPUs: set --threads from 1 to that"
        )


KERNELS_COST = "numpy serves every op of device cpu: its answers are right, and several times slower"
KERNELS_REMEDY = "install a C++20 compiler, then install Ridgeline again"


def missing_kernels(device: str) -> tuple[str, ...]:
    """One line that says what it costs a device that its kernels are missing, and the remedy; () where none are."""
    if device != CPU or find_spec("ridgeline._kernels") is not None:
        return ()
    return (f"the kernels for this CPU are missing: {KERNELS_COST}; {KERNELS_REMEDY} (ridgeline doctor says more)",)


def has_torch() -> bool:
    """Whether torch is installed; it is not imported."""
    return find_spec("torch") is not None


def require_torch(what: str) -> None:
    """Raise DeviceError where torch, which `what` needs, is not installed."""
    if not has_torch():
        raise DeviceError(f"{what} needs torch: pip install 'ridgeline[torch]'")


def _gpus() -> tuple[Device, ...]:
    if not has_torch() or not gpu_driver():
        return ()
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return tuple(Device(f"cuda:{i}", torch.cuda.get_device_name(i)) for i in range(count))
