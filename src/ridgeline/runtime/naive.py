"""Naive sampling (`--cache off`): the whole history is computed again at every token.

The honest baseline: no state is kept between steps, so there is nothing to get wrong, and nothing to be fast with.
Sequences still join and leave at every step.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ridgeline.runtime.load import LoadedModel
from ridgeline.runtime.sampler import NoiseKey, pick, token_logprobs
from ridgeline.runtime.step import DenseStep
from ridgeline.spec.request import CompletionOutput, SamplingParams, Timing

MAX_STEP_TOKENS = 4096  # tokens of one forward pass, unless a single sequence is longer: bounds the activations

OnToken = Callable[[int, int, int], None]  # request index, choice index, token id


@dataclass(frozen=True, slots=True)
class NaiveRequest:
    """A prompt, as ids, and how to continue it."""

    prompt_token_ids: Sequence[int]
    params: SamplingParams
    seed: int  # of the noise, where params.seed is None


@dataclass(slots=True)
class NaiveResult:
    """The answers to one request."""

    outputs: list[CompletionOutput]
    timing: Timing


@dataclass(slots=True)
class _Sequence:
    """One answer on its way."""

    request: int
    prompt_length: int
    tokens: list[int]
    params: SamplingParams
    noise: NoiseKey
    limit: int  # the length at which it must stop
    output: CompletionOutput


@dataclass(slots=True)
class _Clock:
    """When the first and the last token of a request came."""

    first: float | None = None
    last: float = 0.0
    open: int = 0
    outputs: list[CompletionOutput] = field(default_factory=list)


class NaiveGenerator:
    """Continues prompts with a loaded model, any number at once."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._loaded = loaded
        self._memory = loaded.table.memory

    def run(
        self,
        requests: Sequence[NaiveRequest],
        on_token: OnToken = lambda request, choice, token: None,
        on_done: Callable[[int], None] = lambda request: None,
    ) -> list[NaiveResult]:
        """Continue all requests; results in the order given. Prompts must have passed `check_length`."""
        start = time.perf_counter()
        clocks = [_Clock(open=r.params.n) for r in requests]
        waiting = deque(s for i, r in enumerate(requests) for s in self._sequences(i, r, clocks[i]))
        running: list[_Sequence] = []
        while waiting or running:
            self._admit(waiting, running)
            self._step(running)
            now = time.perf_counter()
            for s in running:
                clock = clocks[s.request]
                clock.first = clock.first or now
                clock.last = now
                on_token(s.request, s.output.index, s.tokens[-1])
                if s.output.finish_reason:
                    clock.open -= 1
                    if not clock.open:
                        on_done(s.request)
            running = [s for s in running if s.output.finish_reason is None]
        return [NaiveResult(c.outputs, _timing(c, start)) for c in clocks]

    def _sequences(self, index: int, request: NaiveRequest, clock: _Clock) -> list[_Sequence]:
        params, prompt = request.params, list(request.prompt_token_ids)
        limit = self._loaded.max_model_len
        if params.max_tokens is not None:
            limit = min(limit, len(prompt) + params.max_tokens)
        seed = request.seed if params.seed is None else params.seed
        for choice in range(params.n):
            clock.outputs.append(CompletionOutput(choice, logprobs=None if params.logprobs is None else []))
        return [
            _Sequence(index, len(prompt), list(prompt), params, NoiseKey(seed, output.index), limit, output)
            for output in clock.outputs
        ]

    def _admit(self, waiting: deque[_Sequence], running: list[_Sequence]) -> None:
        """Take on sequences while the step stays within its budget; always at least one."""
        used = sum(len(s.tokens) + 1 for s in running)
        while waiting and (not running or used + len(waiting[0].tokens) <= MAX_STEP_TOKENS):
            running.append(waiting.popleft())
            used += len(running[-1].tokens) + 1

    def _step(self, running: list[_Sequence]) -> None:
        """One forward pass over every running history, and one token for each."""
        step = DenseStep.build([s.tokens for s in running], self._memory)
        logits = self._memory.get(self._loaded.model(step, step.last_rows(self._memory)))
        for sequence, row in zip(running, logits, strict=True):
            self._append(sequence, row)

    def _append(self, s: _Sequence, logits: np.ndarray[Any, Any]) -> None:
        token = pick(logits, s.params, s.tokens, s.noise, len(s.tokens))
        if s.output.logprobs is not None:
            s.output.logprobs.append(token_logprobs(logits, token, s.params.logprobs or 0))
        s.tokens.append(token)
        s.output.token_ids.append(token)
        ends = () if s.params.ignore_eos else self._loaded.checkpoint.eos_token_ids
        if token in ends or token in s.params.stop_token_ids:
            s.output.finish_reason = "stop"
        elif len(s.tokens) >= s.limit:
            s.output.finish_reason = "length"


def _timing(clock: _Clock, start: float) -> Timing:
    first, total = (clock.first or start) - start, clock.last - start
    count = sum(len(o.token_ids) for o in clock.outputs)
    longest = max(len(o.token_ids) for o in clock.outputs)
    per_token = (total - first) / (longest - 1) if longest > 1 else None
    return Timing(first, per_token, total, count / total if total else 0.0)
