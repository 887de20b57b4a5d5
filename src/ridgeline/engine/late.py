"""Answers whose masks are not there when their logits are. They wait alone: the steps of the others go on.

Such an answer keeps its row of logits and is held (`Scheduler.hold`). Once the mask is there its token is sampled from
those logits, so it is the token that it would have been, and the scheduler is given it (`Scheduler.give`).
"""

from __future__ import annotations

from dataclasses import dataclass

from ridgeline.sample.logits import Floats

PATIENCE_SECONDS = 0.002  # that a step waits for masks; most of them take a tenth of that
IDLE_SECONDS = 0.005  # that the engine waits for a mask when nothing else can run


@dataclass(frozen=True, slots=True)
class Late:
    """logits: of the next token [vocabulary]. since: when they were there (time.perf_counter)."""

    logits: Floats
    since: float
