"""Static batching (`--batching static`): the baseline of serving before Orca (Yu et al., OSDI 2022).

Requests are taken in whole batches, the state of each sequence is reserved for the longest context, and no request
joins before the whole batch is done. Unlike systems of that time, it stops computing a sequence that is over.
"""

from __future__ import annotations

from collections import deque

from ridgeline.engine.engine import Engine
from ridgeline.errors import RequestError
from ridgeline.runtime.generator import Event, GenerationRequest
from ridgeline.sched.stats import Stats, StepShape
from ridgeline.spec.request import BeamSearchParams


class StaticGenerator:
    """A runtime.generator.Generator that feeds an Engine batch by batch."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._waiting: deque[tuple[int, GenerationRequest]] = deque()
        config = engine.config
        reserved = (
            (pages - 1) // group.most_pages(config.max_model_len)
            for pages, group in zip(config.num_pages, config.groups, strict=True)
        )
        self._batch_size = min(config.max_num_seqs, *reserved)

    def __len__(self) -> int:
        return len(self._waiting) + len(self._engine)

    def add(self, request_id: int, request: GenerationRequest) -> None:
        if _num_sequences(request) > self._batch_size:
            raise RequestError(
                f"a batch holds {self._batch_size} sequences of {self._engine.config.max_model_len} tokens; "
                f"lower n or beam_width, which is {_num_sequences(request)}, or --max-model-len"
            )
        self._waiting.append((request_id, request))

    def step(self) -> list[Event]:
        if not len(self._engine):
            self._next_batch()
        return self._engine.step()

    def finish(self, request_id: int, choice: int) -> None:
        self._engine.finish(request_id, choice)

    def abort(self, request_id: int) -> None:
        self._waiting = deque(item for item in self._waiting if item[0] != request_id)
        self._engine.abort(request_id)

    def reset(self) -> None:
        self._waiting.clear()
        self._engine.reset()

    def stats(self) -> Stats:
        return self._engine.stats()

    def last_step(self) -> StepShape:
        return self._engine.last_step()

    def check(self) -> None:
        self._engine.check()

    def _next_batch(self) -> None:
        room = self._batch_size
        while self._waiting and _num_sequences(self._waiting[0][1]) <= room:
            request_id, request = self._waiting.popleft()
            room -= _num_sequences(request)
            self._engine.add(request_id, request)


def _num_sequences(request: GenerationRequest) -> int:
    """Return the most sequences that a request runs at once."""
    params = request.params
    return params.beam_width if isinstance(params, BeamSearchParams) else params.n
