"""The cost of a step in one line, as two lectures teach it: what their tables are made of, and a check of ours.

Stanford CS336 (spring 2025, lecture 10): a step reads everything once, (batch x state + weights) / bandwidth.
"How to Scale Your Model" (Austin et al. 2025, chapter on inference): state is read, batch x state / bandwidth, and
then weights are read or multiplied with, whichever takes longer. Neither counts activations, nor the vocabulary's
rows that are not read.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Textbook:
    """weight_bytes, state_bytes: of all weights, of one sequence. bytes_per_s, flops_per_s: of all devices."""

    weight_bytes: float
    state_bytes: float
    bytes_per_s: float
    params: float = 0.0
    flops_per_s: float = float("inf")

    def memory_bytes(self, batch: int) -> float:
        return self.weight_bytes + batch * self.state_bytes

    def step_s(self, batch: int) -> float:
        """Scaling book; CS336 where nothing is said of operations."""
        compute_s = 2 * batch * self.params / self.flops_per_s
        return batch * self.state_bytes / self.bytes_per_s + max(compute_s, self.weight_bytes / self.bytes_per_s)

    def tokens_per_s(self, batch: int) -> float:
        return batch / self.step_s(batch)
