"""Choose how to preempt a sequence: drop its pages and recompute them, or swap them to host memory and back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class PreemptCost:
    """Compares recompute and swap from two rates of a device; it is the scheduler's SwapCost.

    seconds_per_token: time to compute one token of a prompt again, in a chunk. seconds_per_byte: time to copy one byte
    of pages in one direction. Both are measured, or predicted on a calibrated machine, and include launches and
    gathers. A fixed latency is not counted, because a step takes far longer than the start of a copy.
    """

    seconds_per_token: float
    seconds_per_byte: float

    def __call__(self, num_tokens: int, num_bytes: int) -> Literal["recompute", "swap"]:
        """Return the cheaper way for a sequence of `num_tokens` tokens whose pages take `num_bytes`."""
        swap = 2 * num_bytes * self.seconds_per_byte
        return "swap" if swap < num_tokens * self.seconds_per_token else "recompute"
