"""Describe a machine for the roofline: peak rates, memory size and links."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Literal

from ridgeline.spec.rates import Curve, Rates

# The type that products are computed in if a machine has no unit for the type of the operands.
WIDER: Mapping[str, str] = MappingProxyType(
    {"int4": "int8", "mxfp4": "fp8", "fp8": "bfloat16", "int8": "bfloat16", "float16": "bfloat16",
     "bfloat16": "float32"}
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Link:
    """A link between devices.

    bytes_per_s: rate of each device in one direction. latency_s: time of an empty message. source: source of the
    figures. most_devices: most devices that one such link joins; None: no limit is known. sums: whether the switch can
    sum the data of all devices, so that each sends its own only once.
    """

    name: str
    bytes_per_s: float
    latency_s: float
    source: str = ""
    most_devices: int | None = None
    sums: bool = False

    def __post_init__(self) -> None:
        if not self.bytes_per_s > 0 or not self.latency_s >= 0:
            raise ValueError(f"{self.name}: bytes per second must be positive, the latency not negative")


@dataclass(frozen=True, slots=True)
class HardwareSpec:
    """One device.

    Args:
        memory_bytes: Size of the memory, as its maker states it.
        read_bytes_per_s: Bandwidth of that memory.
        flops_per_s: Dense operations per second by type of the operands; a product and its sum are two.
        op_overhead_s, step_overhead_s: Extra seconds of each kernel and of each step, as measured. Default: 0, the
            pure roofline.
        kind: "cpu" means that its memory is the host's.
        sources: Source of each figure, by "memory", "bandwidth", "operations" and "link".
        rates: Measured rates of a calibrated machine; times are then computed from these.
        reads: Measured bytes per second by the bytes that are read again and again, if caches are known.
        host: Link to the host's memory, for weights and state that are kept there; None if it is not known.
    """

    name: str
    memory_bytes: int
    read_bytes_per_s: float
    flops_per_s: Mapping[str, float]
    link: Link | None = None
    op_overhead_s: float = 0.0
    step_overhead_s: float = 0.0
    kind: Literal["gpu", "tpu", "cpu"] = "gpu"
    sources: Mapping[str, str] = field(default_factory=dict)
    rates: Rates | None = None
    reads: Curve | None = None
    host: Link | None = None

    def __post_init__(self) -> None:
        for what, value in (("memory", self.memory_bytes), ("bandwidth", self.read_bytes_per_s)):
            if not value > 0:
                raise ValueError(f"{self.name}: {what} must be positive, not {value}")
        if not self.flops_per_s or not min(self.flops_per_s.values()) > 0:
            raise ValueError(f"{self.name}: operations per second must be positive, of one type at least")
        if not min(self.op_overhead_s, self.step_overhead_s) >= 0:
            raise ValueError(f"{self.name}: overheads must not be negative")

    @property
    def is_measured(self) -> bool:
        """Return whether times on this machine are predictions for this engine, and not only lower bounds."""
        return self.rates is not None or self.step_overhead_s > 0

    def roof(self) -> HardwareSpec:
        """Return the machine with its peaks alone, which gives lower bounds of times."""
        return replace(self, rates=None, op_overhead_s=0.0, step_overhead_s=0.0)

    def unit(self, kind: str) -> str:
        """Return the type that products of a type are computed in: the next wider one if there is no unit."""
        while kind not in self.flops_per_s:
            if kind not in WIDER:
                return max(self.flops_per_s, key=lambda name: self.flops_per_s[name])
            kind = WIDER[kind]
        return kind

    def peak(self, kind: str) -> float:
        """Return the operations per second on operands of a type."""
        return self.flops_per_s[self.unit(kind)]

    def read_rate(self, held_bytes: float) -> float:
        """Return the bytes per second at best if the same `held_bytes` are read in every step.

        A cache that holds them all is faster than the memory. Between two measured sizes the rate of the smaller one
        counts, since the cache may end anywhere between them.
        """
        if self.reads is None:
            return self.read_bytes_per_s
        known = [rate for size, rate in zip(self.reads.points, self.reads.values, strict=True) if size <= held_bytes]
        return max(known[-1] if known else self.reads.values[0], self.read_bytes_per_s)

    def ridge(self, kind: str) -> float:
        """Return the operations per byte above which an operation is compute-bound."""
        return self.peak(kind) / self.read_bytes_per_s
