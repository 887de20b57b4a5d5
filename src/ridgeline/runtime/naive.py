"""Naive sampling (`--cache off`): the whole history is computed again at every token.

The honest baseline: no state is kept between steps, so there is nothing to get wrong, and nothing to be fast with.
Sequences still join and leave at every step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from ridgeline.errors import RequestError
from ridgeline.runtime.batch import GenerationRequest, OnDone, OnToken, Progress
from ridgeline.runtime.load import LoadedModel
from ridgeline.runtime.sampler import SampledToken, SampleRow, sample
from ridgeline.runtime.step import DenseStep
from ridgeline.spec.request import CompletionOutput

# Tokens of one forward pass, counted with the answers at their longest, unless a single sequence is longer; and
# logits of one: they bound the memory of a step.
MAX_STEP_TOKENS = 4096
MAX_STEP_LOGITS = 2**25


@dataclass(slots=True)
class _Sequence:
    """One answer on its way."""

    request: int
    tokens: list[int]
    row: SampleRow
    limit: int  # the length at which it must stop
    output: CompletionOutput


class NaiveGenerator:
    """A runtime.batch.Generator that keeps nothing between tokens."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._loaded = loaded
        self._memory = loaded.table.memory
        self._max_rows = max(1, MAX_STEP_LOGITS // loaded.spec.vocab_size)

    def run(self, requests: Sequence[GenerationRequest], on_token: OnToken, on_done: OnDone) -> None:
        progress = [Progress.begin(r) for r in requests]
        waiting = deque(s for i, p in enumerate(progress) for s in self._sequences(i, p))
        running: list[_Sequence] = []
        while waiting or running:
            self._admit(waiting, running)
            self._step(running)
            for s in running:
                p = progress[s.request]
                p.token_came()
                if s.output.finish_reason != "error":
                    stop = on_token(s.request, s.output.index, s.tokens[-1], s.output.finish_reason == "stop")
                    if stop is not None:
                        s.output.finish_reason, s.output.stop_reason = "stop", stop
                if s.output.finish_reason:
                    p.open -= 1
                    if not p.open:
                        on_done(s.request, p.result(self._loaded))
            running = [s for s in running if s.output.finish_reason is None]

    def _sequences(self, index: int, progress: Progress) -> list[_Sequence]:
        request, limit = progress.request, self._loaded.max_model_len
        prompt, params = list(request.prompt_token_ids), request.params
        if params.max_tokens is not None:
            limit = min(limit, len(prompt) + params.max_tokens)
        return [
            _Sequence(
                index, list(prompt), SampleRow.start(params, prompt, key, self._loaded.eos_token_ids), limit, output
            )
            for output, key in zip(progress.outputs, request.noise, strict=True)
        ]

    def _admit(self, waiting: deque[_Sequence], running: list[_Sequence]) -> None:
        """Take on sequences while the step stays within its budgets; always at least one."""
        used = sum(s.limit for s in running)
        while waiting and (
            not running or (used + waiting[0].limit <= MAX_STEP_TOKENS and len(running) < self._max_rows)
        ):
            running.append(waiting.popleft())
            used += running[-1].limit

    def _step(self, running: list[_Sequence]) -> None:
        """One forward pass over every running history, and one token for each."""
        step = DenseStep.build([s.tokens for s in running], self._memory)
        logits = self._memory.get(self._loaded.model(step, step.last_rows(self._memory)))
        for sequence, found in zip(running, sample(logits, [s.row for s in running]), strict=True):
            self._append(sequence, found)

    def _append(self, s: _Sequence, found: SampledToken | RequestError) -> None:
        if isinstance(found, RequestError):
            s.output.finish_reason, s.output.error = "error", str(found)
            return
        token = found.token
        if s.output.logprobs is not None and found.logprobs is not None:
            s.output.logprobs.append(found.logprobs)
        s.row.push(token)
        s.tokens.append(token)
        s.output.token_ids.append(token)
        if s.row.is_end(token):
            s.output.finish_reason, s.output.stop_reason = "stop", s.row.stop_reason(token)
        elif len(s.tokens) >= s.limit:
            s.output.finish_reason = "length"
