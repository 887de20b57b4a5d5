"""Scheduling policies: a key function over requests. The least key is admitted first and preempted last.

A key is computed once, when a request arrives, so the order of two requests never changes: no request overtakes the
head of the queue, and the first running sequence may take pages from all others. So no request waits forever.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Literal

from ridgeline.sched.sequence import Sequence

Policy = Callable[[Sequence], float]  # ties go to the earlier arrival
# Chooses how to preempt, from the tokens to compute again and the bytes to move each way.
SwapCost = Callable[[int, int], Literal["recompute", "swap"]]


def fcfs(sequence: Sequence) -> float:
    """Return a key for first come, first served."""
    return sequence.arrival


@dataclass(frozen=True, slots=True)
class Priority:
    """Orders requests by priority and age: one point of priority equals `patience` later arrivals.

    A request of priority p is ordered like one of priority 0 that arrived p * patience requests later. So an urgent
    request overtakes others, but a stream of urgent requests cannot delay another one forever.
    """

    patience: float = 1000.0

    def __call__(self, sequence: Sequence) -> float:
        return sequence.arrival + sequence.priority * self.patience


def last_behind(seq: Sequence, running: Seq[Sequence], step: int) -> Sequence | None:
    """Return the last running sequence that is behind `seq` and has no work in `step`; None if there is none."""
    for other in reversed(running):
        if other is seq:
            return None
        if other.last_step != step:
            return other
    return None
