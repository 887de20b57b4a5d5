"""Naive sampling (`--cache off`): compute the whole history again for every token.

It is the baseline for correctness and speed: no state is kept between steps. Sequences join and leave at every step.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from ridgeline.errors import RequestError
from ridgeline.nn.step import Stream
from ridgeline.runtime.generator import Event, GenerationRequest, prompt_entries
from ridgeline.runtime.load import LoadedModel
from ridgeline.sample.logits import Floats
from ridgeline.sample.sampler import SampledToken, SampleRow, sample
from ridgeline.sched.stats import StepShape
from ridgeline.spec.request import BeamSearchParams, FinishReason, TokenLogprobs

# Limits of the memory of a step: tokens of a forward pass, counted as if all answers had their full length (a single
# longer sequence runs alone), and logits.
MAX_STEP_TOKENS = 4096
MAX_STEP_LOGITS = 2**25


@dataclass(slots=True, eq=False)
class _Sequence:
    """An answer that is not complete."""

    request: int
    choice: int
    num_prompt: int
    tokens: list[int]
    row: SampleRow
    limit: int  # the length at which it must stop
    over: bool = False

    def wants_prompt(self) -> bool:
        """Return whether this step scores the prompt: the first step of a request's first answer does."""
        return self.choice == 0 and len(self.tokens) == self.num_prompt and self.row.params.prompt_logprobs is not None


class NaiveGenerator:
    """A runtime.generator.Generator that keeps no state between tokens."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._loaded = loaded
        self._memory = loaded.table.memory
        self._max_rows = max(1, MAX_STEP_LOGITS // loaded.spec.vocab_size)
        self._waiting: deque[_Sequence] = deque()
        self._running: list[_Sequence] = []

    def __len__(self) -> int:
        return len({s.request for s in (*self._waiting, *self._running)})

    def add(self, request_id: int, request: GenerationRequest) -> None:
        prompt, params, limit = list(request.prompt_token_ids), request.params, self._loaded.max_model_len
        if isinstance(params, BeamSearchParams):
            raise RequestError("beam search shares state between beams: it needs the engine (--cache on)")
        if params.max_tokens is not None:
            limit = min(limit, len(prompt) + params.max_tokens)
        row = SampleRow.start(params, prompt, request.noise[0], self._loaded.eos_token_ids, grammar=request.grammar)
        for choice, key in enumerate(request.noise):
            self._waiting.append(_Sequence(request_id, choice, len(prompt), list(prompt), row.again(key), limit))

    def step(self) -> list[Event]:
        """Run one forward pass over all running sequences, and sample one token for each."""
        self._admit()
        if not self._running:
            return []
        running = self._running
        step = self._loaded.dense_step([s.tokens for s in running], [s.num_prompt for s in running])
        stream = self._loaded.model.forward(step)
        logits = self._memory.get(self._loaded.model.logits(stream, step.last_rows(self._memory)))
        entries = self._prompt_logprobs(stream)
        found = sample(logits, [s.row for s in self._running])
        events = [self._take(s, f, entries.get(s)) for s, f in zip(self._running, found, strict=True)]
        self._running = [s for s in self._running if not s.over]
        return events

    def finish(self, request_id: int, choice: int) -> None:
        self._drop(request_id, choice)

    def abort(self, request_id: int) -> None:
        self._drop(request_id, None)

    def reset(self) -> None:
        self._waiting.clear()
        self._running.clear()

    def stats(self) -> None:
        return None

    def last_step(self) -> StepShape:
        return ()

    def check(self) -> None:
        """Do nothing: there are no pages."""

    def _admit(self) -> None:
        """Admit sequences while the step stays within its limits; at least one."""
        used = sum(s.limit for s in self._running)
        while self._waiting and (
            not self._running
            or (used + self._waiting[0].limit <= MAX_STEP_TOKENS and len(self._running) < self._max_rows)
        ):
            self._running.append(self._waiting.popleft())
            used += self._running[-1].limit

    def _prompt_logprobs(self, stream: Stream) -> dict[_Sequence, tuple[TokenLogprobs, ...]]:
        """Return the log probabilities of the prompts that this step scores."""

        def logits(first: int, count: int) -> Floats:
            rows = self._memory.integers(np.arange(first, first + count))
            return self._memory.get(self._loaded.model.logits(stream, rows))

        entries, first = {}, 0
        for s in self._running:
            if s.wants_prompt():
                entries[s] = tuple(prompt_entries(logits, first, s.tokens[1:], s.row.params.prompt_logprobs or 0))
            first += len(s.tokens)
        return entries

    def _take(
        self, s: _Sequence, found: SampledToken | RequestError, entries: tuple[TokenLogprobs, ...] | None
    ) -> Event:
        if isinstance(found, RequestError):
            s.over = True
            return Event(s.request, s.choice, finish_reason="error", error=found, prompt_logprobs=entries)
        reason: FinishReason | None = None
        stop: int | None = None
        s.row.push(found.token)
        s.tokens.append(found.token)
        if s.row.is_end(found.token):
            reason, stop = "stop", s.row.stop_reason(found.token)
        elif len(s.tokens) >= s.limit:
            reason = "length"
        s.over = reason is not None
        logprobs = () if found.logprobs is None else (found.logprobs,)
        return Event(s.request, s.choice, (found.token,), logprobs, reason, stop, prompt_logprobs=entries)

    def _drop(self, request: int, choice: int | None) -> None:
        def kept(s: _Sequence) -> bool:
            return s.request != request or choice not in (None, s.choice)

        self._waiting = deque(s for s in self._waiting if kept(s))
        self._running = [s for s in self._running if kept(s)]
