"""The expected time of a step on a machine that was not calibrated: the roofline with efficiencies.

Each operation takes the longer of two times, for its arithmetic and its bytes, at a fraction of the machine's peaks,
and a fixed time for its kernel. A step has a fixed time, and one for each of its sequences. The numbers are fitted to
published results by bench/plan_published.py, and stand in data/efficiency.json:

    memory, state           fraction of the bandwidth, for weights and for keys and values or recurrent states
    experts, codes8, codes4 fraction of `memory` that is left for experts, and for weights that become floats first
    compute16, 8, 4         fraction of the operations per second, by the bits of the operands
    attention               the same for attention over prompts, and for recurrent scans
    link                    time of a collective relative to the measured all-reduce alone (cost/collectives.py)
    kernel_s, step_s, sequence_s, request_s   seconds of a kernel, a step, a sequence of a step, and of a new request

Each number is a typical value times a factor of the GPU's generation; a generation without results has the typical
values, and a wider band. Errors are log-normal.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from math import exp
from typing import Any, Literal

from ridgeline.cost.collectives import all_reduce_s
from ridgeline.cost.operations import Operation, Slice
from ridgeline.cost.precision import storage_of
from ridgeline.cost.roofline import StepTime, Timed, time_step
from ridgeline.spec.hardware import HardwareSpec

Kind = Literal["tpot", "ttft", "throughput"]
Known = Literal["machine", "family", "none"]
# On a calibrated CPU: medians of 8.8 % for TPOT and 12.5 % for TTFT over new cases, as deviations of a normal error.
_CALIBRATED = {"tpot": 0.13, "ttft": 0.185, "throughput": 0.13}
PERCENTILES: Mapping[str, float] = {"p10": -1.2816, "p50": 0.0, "p90": 1.2816}  # of a normal distribution


@dataclass(frozen=True, slots=True)
class Efficiency:
    """Holds the fractions and times that a machine is expected to reach.

    values: the numbers of the module's docstring. known: whether results of this machine were in the fit, or only of
    others of its generation, or neither. spread: standard deviation of the logarithm of a time, by figure.
    """

    values: Mapping[str, float]
    known: Known
    spread: Mapping[str, float]

    def at(self, median: float, kind: Kind, normal: float) -> float:
        """Return the time that is `normal` standard deviations above its median."""
        return median * exp(normal * self.spread[kind])


CALIBRATED = Efficiency({}, "machine", _CALIBRATED)


def efficiency_of(hardware: HardwareSpec) -> Efficiency | None:
    """Return what a machine is expected to reach; None for a CPU and a TPU, of which nobody published enough."""
    if hardware.kind != "gpu" or hardware.is_measured:
        return None
    data = _data()
    family = data["families"].get(hardware.name)
    factors = data["by_family"].get(family, {})
    known: Known = "machine" if hardware.name in data["machines"] else "family" if factors else "none"
    values = {name: value * factors.get(name, 1.0) for name, value in data["typical"].items()}
    return Efficiency(values, known, data["spread"][known])


def expected_step(
    operations: Sequence[Operation], batch: Sequence[Slice], hardware: HardwareSpec, found: Efficiency
) -> StepTime:
    """Return the expected time of a step by operation. Raises RequestError as `time_step` does."""
    values, roof = found.values, time_step(operations, hardware.roof())
    timed = tuple(_expected(one, hardware, values) for one in roof.operations)
    sequences = sum(s.count for s in batch)
    return StepTime(timed, values["step_s"] + sequences * values["sequence_s"])


def compute_class(op: Operation, unit: str) -> str:
    """Return the name of the fraction of the arithmetic. unit: type that the machine computes the operation in."""
    if op.kind == "state":
        return "attention"
    bits = storage_of(unit).bits
    return "compute4" if bits <= 4 else "compute8" if bits == 8 else "compute16"


def memory_classes(op: Operation) -> tuple[str, ...]:
    """Return the names of the fractions of the bandwidth, which are multiplied."""
    if op.kind == "state":
        return ("state",)
    names = ["memory"]
    if op.name.startswith("experts."):
        names.append("experts")
    if op.stored and (bits := storage_of(op.stored).bits) < storage_of(op.compute).bits:
        names.append("codes4" if bits <= 5 else "codes8")
    return tuple(names)


def collective_s(op: Operation, hardware: HardwareSpec) -> float:
    """Return the measured seconds of one collective; those that do not sum take half of an all-reduce."""
    if op.reduced_bytes:
        return all_reduce_s(hardware.name, op.devices, op.reduced_bytes, hardware.link)
    return 0.5 * all_reduce_s(hardware.name, op.devices, 2 * op.link_bytes, hardware.link)


def _expected(one: Timed, hardware: HardwareSpec, values: Mapping[str, float]) -> Timed:
    op = one.operation
    if op.messages:
        link_s = max(op.layers * values["link"] * collective_s(op, hardware), one.link_s)
        return Timed(op, 0.0, 0.0, 0.0, link_s)
    fraction = 1.0
    for name in memory_classes(op):
        fraction *= values[name]
    compute_s = one.compute_s / values[compute_class(op, hardware.unit(op.compute))]
    return Timed(op, compute_s, one.memory_s / fraction, op.layers * values["kernel_s"])


@cache
def _data() -> Any:
    return json.loads(files("ridgeline.cost").joinpath("data", "efficiency.json").read_text(encoding="utf-8"))
