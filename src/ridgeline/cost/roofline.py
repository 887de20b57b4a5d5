"""How long a step takes: each operation no less than its arithmetic at the peak, and no less than its bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ridgeline.cost.operations import Operation
from ridgeline.errors import RequestError
from ridgeline.spec.hardware import HardwareSpec

Bound = Literal["compute", "weights", "state", "activations", "link", "overhead"]
BOUNDS: tuple[Bound, ...] = ("compute", "weights", "state", "activations", "link", "overhead")


@dataclass(frozen=True, slots=True)
class Timed:
    """An operation on a machine, all its layers. link_s: what devices send to each other, before or after it."""

    operation: Operation
    compute_s: float
    memory_s: float
    overhead_s: float
    link_s: float = 0.0

    @property
    def seconds(self) -> float:
        return max(self.compute_s, self.memory_s) + self.link_s + self.overhead_s

    @property
    def bound(self) -> Bound:
        """What most of its time is."""
        busy = max(self.compute_s, self.memory_s)
        if max(self.overhead_s, self.link_s) > busy:
            return "overhead" if self.overhead_s > self.link_s else "link"
        if self.compute_s >= self.memory_s:
            return "compute"
        op = self.operation
        sizes: dict[Bound, float] = {
            "weights": op.weight_bytes, "state": op.state_bytes, "activations": op.activation_bytes,
        }  # fmt: skip
        return max(sizes, key=lambda name: sizes[name])

    @property
    def slack(self) -> float:
        """How many times longer what binds it takes than the other of computing and moving bytes; at least 1."""
        fast, slow = sorted((self.compute_s, self.memory_s))
        return slow / fast if fast else float("inf")


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
        found: dict[Bound, float] = dict.fromkeys(BOUNDS, 0.0)
        for t in self.operations:
            found[t.bound] += t.seconds
        found["overhead"] += self.overhead_s
        return found


def time_step(operations: Sequence[Operation], hardware: HardwareSpec) -> StepTime:
    """The roofline of a step: operations run one after the other, each at the slower of its two limits.

    Raises RequestError where devices send to each other over a link that the machine does not have.
    """
    return StepTime(tuple(_time(op, hardware) for op in operations), hardware.step_overhead_s)


def link_seconds(op: Operation, hardware: HardwareSpec) -> float:
    """Of what devices send to each other in all layers. Raises RequestError where there is no link."""
    if not op.messages:
        return 0.0
    if hardware.link is None:
        raise RequestError(f"{hardware.name} has no link between devices; name one: --link ethernet-100g")
    return op.layers * (op.link_bytes / hardware.link.bytes_per_s + op.messages * hardware.link.latency_s)


def _time(op: Operation, hardware: HardwareSpec) -> Timed:
    layers, link_s = op.layers, link_seconds(op, hardware)
    compute_s = layers * op.flops / hardware.peak(op.compute)
    memory_s = layers * op.bytes / hardware.read_bytes_per_s
    return Timed(op, compute_s, memory_s, layers * hardware.op_overhead_s, link_s)
