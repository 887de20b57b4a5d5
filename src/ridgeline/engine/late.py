"""Answers whose mask was not ready when their logits were: they wait alone, and the steps of the others continue.

Such an answer keeps its row of logits and is held (`Scheduler.hold`). Once the mask is ready, its token is sampled from
those logits, so it is the token that it would have been, and the scheduler takes it (`Scheduler.give`).
"""

from __future__ import annotations

import time
from collections.abc import Iterator

from ridgeline.engine.answers import Answer
from ridgeline.errors import RequestError
from ridgeline.runtime.sampling import Late
from ridgeline.sample.masks import MAX_WAIT_SECONDS, TOO_LATE
from ridgeline.sample.sampler import SampledToken, sample
from ridgeline.sched.scheduler import Scheduler

IDLE_SECONDS = 0.005  # the engine waits so long for a mask when nothing else can run


class LateRows:
    """The answers of one engine that wait for a mask."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._in_flight: dict[int, Late] = {}  # by sequence; their steps are not committed yet
        self._waiting: dict[int, tuple[Answer, Late]] = {}  # by sequence; no more than run at once

    def __len__(self) -> int:
        """Return the number of answers that wait."""
        return len(self._in_flight) + len(self._waiting)

    def hold(self, answer: Answer, late: Late) -> None:
        """Run nothing of an answer until its mask is ready. Its step is not committed yet."""
        self._in_flight[answer.sequence.id] = late
        self._scheduler.hold(answer.sequence.id)

    def commit(self, answer: Answer) -> None:
        """Note that the step of the answer was committed, without a token."""
        late = self._in_flight.pop(answer.sequence.id, None)
        if late is not None:
            self._waiting[answer.sequence.id] = answer, late

    def drop(self, sequence: int) -> None:
        """Forget an answer that is over."""
        self._in_flight.pop(sequence, None)
        self._waiting.pop(sequence, None)

    def drop_preempted(self) -> None:
        """Free the logits of answers that were preempted: their last tokens are computed and sampled again."""
        for sequence in [s for s in self._waiting if not self._scheduler.is_held(s)]:
            answer, late = self._waiting.pop(sequence)
            answer.waited += time.perf_counter() - late.since

    def wait(self) -> bool:
        """Wait for a mask for a moment; False if no answer needs one."""
        for answer, _ in self._waiting.values():
            answer.row.wait(IDLE_SECONDS)
            return True
        return False

    def ready(self) -> Iterator[tuple[Answer, SampledToken | RequestError]]:
        """Yield (answer, token) for each answer whose mask is ready, and (answer, error) if it waited too long."""
        for sequence, (answer, late) in list(self._waiting.items()):
            waited = answer.waited + time.perf_counter() - late.since
            is_ready = answer.row.wait(0)
            if not is_ready and waited <= MAX_WAIT_SECONDS:
                continue
            del self._waiting[sequence]
            answer.waited = waited
            error = RequestError(TOO_LATE.format(MAX_WAIT_SECONDS))
            yield answer, sample(late.logits[None], [answer.row])[0] if is_ready else error
