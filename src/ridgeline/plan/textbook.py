"""The cost of a step in one line, as two lectures teach it. It serves as a check of the planner.

Stanford CS336 (spring 2025, lecture 10): a step reads everything once, (batch x state + weights) / bandwidth. "How to
Scale Your Model" (Austin et al. 2025, chapter on inference): a step reads the state, batch x state / bandwidth; then it
reads the weights or multiplies with them, whichever takes longer. Both ignore activations, and count the whole
embedding although only some rows are read.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Textbook:
    """weight_bytes: bytes of all weights. state_bytes: bytes of one sequence's state. bytes_per_s, flops_per_s: rates
    of all devices together.
    """

    weight_bytes: float
    state_bytes: float
    bytes_per_s: float
    params: float = 0.0
    flops_per_s: float = float("inf")

    def memory_bytes(self, batch: int) -> float:
        return self.weight_bytes + batch * self.state_bytes

    def step_s(self, batch: int) -> float:
        """Return the seconds of a step by "How to Scale Your Model", or by CS336 if no operations are given."""
        compute_s = 2 * batch * self.params / self.flops_per_s
        return batch * self.state_bytes / self.bytes_per_s + max(compute_s, self.weight_bytes / self.bytes_per_s)

    def tokens_per_s(self, batch: int) -> float:
        return batch / self.step_s(batch)
