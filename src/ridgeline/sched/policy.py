"""Who goes first, as a key function over requests: the least key is admitted first and preempted last.

A key is computed once, when a request arrives, so the order of two requests never changes: the head of the queue is
never passed by, the best running sequence may take pages from all others, and so every request gets its turn.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from ridgeline.sched.sequence import Sequence

Policy = Callable[[Sequence], float]  # ties go to the earlier arrival


def fcfs(sequence: Sequence) -> float:
    """First come, first served."""
    return sequence.arrival


@dataclass(frozen=True, slots=True)
class Priority:
    """By priority, with age: a point of priority is worth `patience` later arrivals.

    A request of priority p stands where one of priority 0 would that arrived p * patience requests later. So an
    urgent one overtakes, and no stream of urgent ones holds up another for ever.
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
