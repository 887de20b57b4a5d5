"""How to preempt: give the pages up and compute the sequence again, or copy them to the host and back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class PreemptCost:
    """The scheduler's SwapCost, from two rates of a device.

    seconds_per_token: to compute a token of a prompt again, in a chunk. seconds_per_byte: to copy pages one way. Both
    are measured, or predicted where the machine was calibrated, with everything that is paid each time (launches,
    gathers), so a fixed latency is no term of its own: a step takes far longer than to begin a copy.
    """

    seconds_per_token: float
    seconds_per_byte: float

    def __call__(self, num_tokens: int, num_bytes: int) -> Literal["recompute", "swap"]:
        """The cheaper way for a sequence of `num_tokens` tokens whose pages take `num_bytes`: they go out and in."""
        swap = 2 * num_bytes * self.seconds_per_byte
        return "swap" if swap < num_tokens * self.seconds_per_token else "recompute"
