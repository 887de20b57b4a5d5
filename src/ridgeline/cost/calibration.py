"""Store the results of `ridgeline calibrate` in the user's cache folder, and read them for the planner.

There is one file for each machine: its CPU, its cores, the kernels (size of the extension and the requested instruction
set) and the version of Ridgeline. A file of another format or of another machine is ignored.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from hashlib import blake2b
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ridgeline.catalog.hardware_file import read_hardware
from ridgeline.catalog.machines import hardware
from ridgeline.cost.gpu_calibration import FORMAT as GPU_FORMAT
from ridgeline.cost.gpu_calibration import (
    GPU_REMEDY,
    MEASURED_CEILINGS,
    GpuCalibration,
    GpuRates,
    calibrated_gpu,
    machine_of_gpu,
)
from ridgeline.errors import RequestError
from ridgeline.spec.folders import cache_folder, read_text, write_whole
from ridgeline.spec.hardware import HardwareSpec, Link
from ridgeline.spec.rates import Curve, Passes, Rates
from ridgeline.system import cpu_name, num_cores, total_bytes

FORMAT = 3  # format of the files; it increases when the meaning of a field changes
GENERIC = "cpu-laptop"  # used for a machine that is not calibrated
LOCAL = "local"
BUSY = 0.1  # share of all cores that other programs use, above which a calibration is not trusted
UNSTEADY = 0.1  # change of the processor's speed, above which a calibration is not trusted
AGAIN = "run `ridgeline calibrate` again when this machine is idle"
MOST_BYTES = 1 << 20  # of a file with a calibration; ours have about 20 kB
REMEDY = "run `ridgeline calibrate`, which measures it in half a minute"


@dataclass(frozen=True, slots=True)
class Calibration:
    """Results of one calibration.

    date: the day of the measurement, ISO 8601. seconds: how long it took. others: share of all cores that other
    programs used meanwhile. speed_change: time of one and the same computation at the end, divided by that at the
    beginning, less 1: the clock changed, or another machine on the same host took part of this one.
    threads_per_core: hardware threads that share a core; the kernels use one of each.
    """

    machine: Mapping[str, str]
    rates: Rates
    date: str
    seconds: float
    others: float
    speed_change: float = 0.0
    threads_per_core: int = 1

    @property
    def is_busy(self) -> bool:
        """Return whether other programs made the rates too low."""
        return self.others > BUSY

    @property
    def is_unsteady(self) -> bool:
        """Return whether the processor's speed changed during the measurement."""
        return abs(self.speed_change) > UNSTEADY

    @property
    def conditions(self) -> str:
        """Return when it was made, and what else the machine did."""
        said = f"calibrated on {self.date} while other programs used {self.others:.0%} of the machine"
        if self.is_unsteady:
            said += f" and its speed changed by {abs(self.speed_change):.0%}"
        if self.threads_per_core > 1:
            said += f", with one of the {self.threads_per_core} hardware threads of each core"
        return said

    def may_replace(self, kept: Calibration | None) -> bool:
        """Return whether this calibration may take the place of an earlier one: a busy one of a quieter one may not."""
        return kept is None or not self.is_busy or self.others <= kept.others


def fingerprint() -> dict[str, str]:
    """Return the facts that a calibration depends on."""
    found = find_spec("ridgeline._kernels")
    return {
        "cpu": cpu_name(),
        "cores": str(num_cores()),
        "kernels": str(Path(found.origin).stat().st_size) if found and found.origin else "none",
        "isa": os.environ.get("RIDGELINE_ISA", "the widest"),
        "version": version("ridgeline"),
    }


def calibration_path() -> Path:
    """Return the path of this machine's calibration."""
    name = blake2b(json.dumps(fingerprint(), sort_keys=True).encode(), digest_size=8).hexdigest()
    return cache_folder() / "calibration" / f"{name}.json"


def save(found: Calibration) -> Path:
    """Write a calibration as a whole, and return its path. Raises OSError if it cannot be written."""
    path = calibration_path()
    write_whole(path, json.dumps({"format": FORMAT, **asdict(found)}, indent=1))
    return path


def load() -> Calibration | None:
    """Return this machine's calibration; None if there is none, or if the file is not valid."""
    try:
        value = json.loads(calibration_path().read_text(encoding="utf-8"))
        if value.pop("format") != FORMAT or value["machine"] != fingerprint():
            return None
        return Calibration(**{**value, "rates": read_rates(value["rates"])})
    except (OSError, ValueError, TypeError, LookupError, AttributeError):
        return None


def read_rates(value: Mapping[str, Any]) -> Rates:
    """Read rates that `asdict` and JSON wrote.

    Raises ValueError, TypeError, LookupError or AttributeError otherwise.
    """

    def curve(v: Mapping[str, Any]) -> Curve:
        return Curve(tuple(v["points"]), tuple(v["values"]))

    def passes(v: Mapping[str, Any]) -> Passes:
        return Passes(curve(v["near"]), curve(v["far"]))

    return Rates(
        int(value["threads"]), str(value["isa"]), {k: curve(v) for k, v in value["read"].items()},
        {k: curve(v) for k, v in value["copy"].items()}, curve(value["far"]),
        {k: passes(v) for k, v in value["products"].items()}, {k: passes(v) for k, v in value["attention"].items()},
        {k: float(v) for k, v in value["terms"].items()},
    )  # fmt: skip


def carry(found: Calibration | GpuCalibration, path: Path) -> None:
    """Write a calibration of this machine to a file that another machine reads. Raises OSError.

    The file also has the size of the memory, which the other machine cannot ask for.
    """
    own = {"kind": "cpu", "format": FORMAT, "memory_bytes": total_bytes()}
    gpu = {"kind": "gpu", "format": GPU_FORMAT}
    write_whole(path, json.dumps((own if isinstance(found, Calibration) else gpu) | asdict(found), indent=1))


def carried(path: Path) -> tuple[HardwareSpec, str]:
    """Return the machine of a file that `carry` wrote, and a line that says how far its times can be trusted.

    Raises RequestError for any other file.
    """
    wrong = f"--hardware {path} is no calibration; write one with `ridgeline calibrate --out {path.name}`"
    try:
        value = json.loads(read_text(path, MOST_BYTES))
        kind, written = value.pop("kind"), value.pop("format")
        if (kind, written) not in (("cpu", FORMAT), ("gpu", GPU_FORMAT)):
            raise RequestError(f"{wrong}, with the version of Ridgeline that reads it")
        if kind == "gpu":
            gpu = GpuCalibration(**value | {"rates": GpuRates(**value["rates"])})
            machine = machine_of_gpu(gpu)
            return machine, f"{machine.name}, calibrated on {gpu.date}, as {path} says: {MEASURED_CEILINGS}"
        memory = int(value.pop("memory_bytes"))
        made = Calibration(**value | {"rates": read_rates(value["rates"])})
        found = machine_of(made)
        name = found.name.removeprefix("this machine (").removesuffix(")")
        return replace(found, name=name, memory_bytes=memory), (
            f"{name}, {made.conditions}, as {path} says: times are predictions for this engine there"
        )
    except OSError as e:
        raise RequestError(f"--hardware {path} cannot be read: {e.strerror or e}") from None
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
        raise RequestError(wrong) from None


def machine_of(found: Calibration) -> HardwareSpec:
    """Return a machine as it was measured. Its peaks are the best rates that its kernels reach.

    Several such devices are linked by shared memory: a message is a copy. The latency of a message was not measured and
    counts as 0.
    """
    rates, said = found.rates, f"measured by ridgeline calibrate on {found.date}, {found.rates.threads} threads"
    return HardwareSpec(
        name=f"this machine ({found.machine['cpu']}, {found.machine['cores']} cores)",
        memory_bytes=total_bytes(),
        read_bytes_per_s=rates.read[str(rates.threads)].values[-1],
        flops_per_s={kind: 2 / min(p.near.values) for kind, p in rates.products.items()},
        kind="cpu",
        link=Link("shared memory", rates.copy[str(rates.threads)].values[-1], 0.0, f"copying, {said}"),
        sources={
            "memory": "as the operating system reports",
            "bandwidth": said,
            "operations": said,
            "link": f"copying, {said}",
        },
        rates=rates,
        reads=rates.read[str(rates.threads)],
    )


def this_machine() -> tuple[HardwareSpec, str]:
    """Return this machine as measured, or else as a generic CPU with its memory; and a line that says which."""
    found = load()
    if found is not None:
        doubt = f", and too long where it was busy: {AGAIN}" if found.is_busy or found.is_unsteady else ""
        return machine_of(found), f"{found.conditions}: times are predictions for this engine{doubt}"
    generic = hardware(GENERIC)
    name = f"this machine, treated as a generic CPU ({GENERIC})"
    line = (
        f"this machine is not calibrated, so times are lower bounds by the roofline of a generic CPU ({GENERIC}); "
        f"{REMEDY}"
    )
    return replace(generic, name=name, memory_bytes=total_bytes()), line


def find_machine(name: str, gpu: Callable[[], Mapping[str, str] | None] = lambda: None) -> tuple[HardwareSpec, str]:
    """Return a machine, and a line that says how far its times can be trusted.

    name: a name of the catalog, `local` for this machine, or a file: TOML that describes a machine
    (catalog/hardware_file.py), or a calibration of another one. gpu: returns the facts of this machine's GPU, or None.
    `local` is the GPU if it is calibrated, else the CPU.
    Raises RequestError with the nearest names.
    """
    if name.lower() == LOCAL:
        facts = gpu()
        if facts is None:
            return this_machine()
        found, note = calibrated_gpu(facts)
        if found is not None:
            return found, note
        machine, line = this_machine()
        return machine, f"{line}; this is the CPU, because {facts['gpu']} is not calibrated: {GPU_REMEDY}"
    if (path := Path(name)).suffix.lower() == ".json":
        return carried(path)
    return read_hardware(path) if path.suffix.lower() == ".toml" else hardware(name), (
        "times are lower bounds by the roofline: each operation takes as long as its arithmetic or its bytes at peak "
        "rates, whichever takes longer. Kernel launches and the host's work are not included"
    )
