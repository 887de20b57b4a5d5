"""Compute the least time of a step: each operation takes the longer of two times, for its arithmetic and its bytes."""

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
    """Time of an operation on a machine, over all its layers. link_s: time to send data between devices."""

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
        """Return the cause of most of the time."""
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
        """Return the longer of computing and moving bytes, divided by the shorter one; at least 1."""
        fast, slow = sorted((self.compute_s, self.memory_s))
        return slow / fast if fast else float("inf")


@dataclass(frozen=True, slots=True)
class StepTime:
    """Time of a step on a machine: its operations, and the overhead of each step."""

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
        """Return the seconds by cause; they sum to the step's seconds."""
        found: dict[Bound, float] = dict.fromkeys(BOUNDS, 0.0)
        for t in self.operations:
            found[t.bound] += t.seconds
        found["overhead"] += self.overhead_s
        return found


def time_step(operations: Sequence[Operation], hardware: HardwareSpec) -> StepTime:
    """Return the time of a step if operations run one after the other, each at the slower of its two limits.

    Bytes come from the memory, or from a cache if the machine has one that holds all weights and state of the step.

    Raises RequestError if devices send data to each other over a link that the machine does not have.
    """
    rate = hardware.read_rate(sum(op.layers * held_bytes(op) for op in operations))
    return StepTime(tuple(_time(op, hardware, rate) for op in operations), hardware.step_overhead_s)


def held_bytes(op: Operation) -> float:
    """Return the bytes of weights and state that a step reads in one layer.

    A recurrent state is read and written back, so its bytes are moved twice, but it takes its space only once.
    """
    in_place = op.kind == "state" and not op.passes
    return op.weight_bytes + op.state_bytes / (2.0 if in_place else 1.0)


def link_seconds(op: Operation, hardware: HardwareSpec) -> float:
    """Return the seconds of sending data between devices in all layers. Raises RequestError if there is no link."""
    if not op.messages:
        return 0.0
    if hardware.link is None:
        raise RequestError(f"{hardware.name} has no link between devices; name one: --link ethernet-100g")
    link = hardware.link
    sent = min(op.link_bytes, op.reduced_bytes) if link.sums and op.reduced_bytes else op.link_bytes
    return op.layers * (sent / link.bytes_per_s + op.messages * link.latency_s)


def _time(op: Operation, hardware: HardwareSpec, read_bytes_per_s: float) -> Timed:
    layers, link_s = op.layers, link_seconds(op, hardware)
    compute_s = layers * op.flops / hardware.peak(op.compute)
    memory_s = layers * op.bytes / read_bytes_per_s
    return Timed(op, compute_s, memory_s, layers * hardware.op_overhead_s, link_s)
