"""Keep a share of the weights or of the state in the host's memory, and send it to the device in each step.

These bytes arrive while the device computes, so a step takes the longer of two times: that of the device, and that of
the host's link (arXiv:2303.06865 describes such a schedule). An engine that waits for each transfer takes their sum.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ridgeline.cost.operations import Operation
from ridgeline.cost.roofline import StepTime, Timed
from ridgeline.errors import RequestError
from ridgeline.spec.hardware import HardwareSpec

NAME = "from the host"


@dataclass(frozen=True, slots=True)
class Offload:
    """Shares of the weights and of the state that are in the host's memory. Raises RequestError outside of 0 to 1."""

    weights: float = 0.0
    state: float = 0.0

    def __post_init__(self) -> None:
        for name in ("weights", "state"):
            if not 0 <= (share := getattr(self, name)) <= 1:
                raise RequestError(f"the share of {name} in the host's memory is {share}; it must be from 0 to 1")

    def __bool__(self) -> bool:
        return self.weights > 0 or self.state > 0

    def check(self, hardware: HardwareSpec) -> None:
        """Raise RequestError for a machine without another memory, or without a known link to it."""
        if self and hardware.kind == "cpu":
            raise RequestError(f"{hardware.name} has no other memory: a CPU's memory is the host's; leave out offload")
        if self and hardware.host is None:
            raise RequestError(
                f'the link of {hardware.name} to its host is not known; give one in a file: host = "pcie5"'
            )

    def sent_bytes(self, step: StepTime) -> float:
        """Return the bytes that one device gets from the host in a step."""
        ops = [t.operation for t in step.operations]
        weights = sum(op.layers * op.weight_bytes for op in ops)
        return self.weights * weights + self.state * sum(op.layers * op.state_bytes for op in ops)

    def timed(self, step: StepTime, hardware: HardwareSpec) -> StepTime:
        """Return a step with the time for which the device waits for the host."""
        if not self:
            return step
        assert hardware.host is not None
        size = self.sent_bytes(step)
        wait = size / hardware.host.bytes_per_s + hardware.host.latency_s - step.seconds
        sent = Operation(NAME, "other", 1, 0.0, 0.0, 0.0, 0.0, "float32", link_bytes=size)
        return replace(step, operations=(*step.operations, Timed(sent, 0.0, 0.0, 0.0, max(wait, 0.0))))
