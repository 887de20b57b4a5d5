"""How long a step takes: each operation no less than its arithmetic at the peak, and no less than its bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ridgeline.plan.operations import Operation
from ridgeline.spec.hardware import HardwareSpec

Bound = Literal["compute", "weights", "state", "activations", "overhead"]


@dataclass(frozen=True, slots=True)
class Timed:
    """An operation on a machine, all its layers."""

    operation: Operation
    compute_s: float
    memory_s: float
    overhead_s: float

    @property
    def seconds(self) -> float:
        return max(self.compute_s, self.memory_s) + self.overhead_s

    @property
    def bound(self) -> Bound:
        """What most of its time is."""
        if self.overhead_s > max(self.compute_s, self.memory_s):
            return "overhead"
        if self.compute_s >= self.memory_s:
            return "compute"
        op = self.operation
        sizes: dict[Bound, float] = {
            "weights": op.weight_bytes, "state": op.state_bytes, "activations": op.activation_bytes,
        }  # fmt: skip
        return max(sizes, key=lambda name: sizes[name])


@dataclass(frozen=True, slots=True)
class StepTime:
    """A step on a machine: its operations, and what each step costs besides."""

    operations: tuple[Timed, ...]
    overhead_s: float

    @property
    def seconds(self) -> float:
        return self.overhead_s + sum(t.seconds for t in self.operations)

    @property
    def flops(self) -> float:
        return sum(t.operation.flops * t.operation.layers for t in self.operations)

    @property
    def bytes(self) -> float:
        return sum(t.operation.bytes * t.operation.layers for t in self.operations)

    def by_cause(self) -> dict[Bound, float]:
        """Seconds by what bounds them; they sum to the step's."""
        found: dict[Bound, float] = dict.fromkeys(("compute", "weights", "state", "activations", "overhead"), 0.0)
        for t in self.operations:
            found[t.bound] += t.seconds
        found["overhead"] += self.overhead_s
        return found


def time_step(operations: Sequence[Operation], hardware: HardwareSpec) -> StepTime:
    """The roofline of a step."""
    return StepTime(tuple(_time(op, hardware) for op in operations), hardware.step_overhead_s)


def _time(op: Operation, hardware: HardwareSpec) -> Timed:
    return Timed(
        op,
        op.layers * op.flops / hardware.peak(op.compute),
        op.layers * op.bytes / hardware.read_bytes_per_s,
        op.layers * hardware.op_overhead_s,
    )
