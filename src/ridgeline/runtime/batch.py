"""What a generator takes and gives, whichever way it computes: naive sampling and the engine are both one."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from ridgeline.runtime.load import LoadedModel
from ridgeline.runtime.sampler import NoiseKey, prompt_logprobs
from ridgeline.runtime.step import DenseStep
from ridgeline.spec.request import CompletionOutput, SamplingParams, Timing, TokenLogprobs

PROMPT_CHUNK = 256  # positions whose logits are held at once, for prompt_logprobs

# Request index, choice index, token id, whether the token ended the answer -> the stop string that its text completed.
OnToken = Callable[[int, int, int, bool], str | None]


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A prompt, as ids, and how to continue it. noise: a key for each of its params.n answers."""

    prompt_token_ids: Sequence[int]
    params: SamplingParams
    noise: tuple[NoiseKey, ...]


@dataclass(slots=True)
class GenerationResult:
    """The answers to one request. num_cached_tokens: of the prompt, found in the prefix cache."""

    outputs: list[CompletionOutput]
    timing: Timing
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    num_cached_tokens: int = 0


OnDone = Callable[[int, GenerationResult], None]


class Generator(Protocol):
    """Continues prompts, any number at once."""

    def run(self, requests: Sequence[GenerationRequest], on_token: OnToken, on_done: OnDone) -> None:
        """Continue all requests.

        on_token: called with every new token; where it returns a stop string, that answer ends. on_done: called with
        each request's index and result as soon as all its answers are complete.
        """
        ...


@dataclass(slots=True)
class Progress:
    """What came of one request so far, and when its first and its last token came."""

    request: GenerationRequest
    start: float
    outputs: list[CompletionOutput] = field(default_factory=list)
    open: int = 0
    first: float | None = None
    last: float = 0.0
    num_cached_tokens: int = 0

    @classmethod
    def begin(cls, request: GenerationRequest) -> Progress:
        wanted = request.params.logprobs is not None
        outputs = [CompletionOutput(i, logprobs=[] if wanted else None) for i in range(request.params.n)]
        return cls(request, time.perf_counter(), outputs, len(outputs))

    def token_came(self) -> None:
        self.last = time.perf_counter()
        self.first = self.first or self.last

    def timing(self) -> Timing:
        first, total = (self.first or self.start) - self.start, max(self.last - self.start, 0.0)
        count = sum(len(o.token_ids) for o in self.outputs)
        longest = max(len(o.token_ids) for o in self.outputs)
        per_token = (total - first) / (longest - 1) if longest > 1 else None
        return Timing(first, per_token, total, count / total if total else 0.0)

    def result(self, loaded: LoadedModel) -> GenerationResult:
        """What the request came to, once all its answers are complete."""
        prompt, count = self.request.prompt_token_ids, self.request.params.prompt_logprobs
        entries = None if count is None else prompt_entries(loaded, prompt, count)
        return GenerationResult(self.outputs, self.timing(), entries, self.num_cached_tokens)


def prompt_entries(loaded: LoadedModel, prompt: Sequence[int], count: int) -> list[TokenLogprobs | None]:
    """Log probabilities of a prompt's tokens (None for the first) and of the `count` likeliest ones at each place.

    Chunk by chunk, the prompt computed again for each: nobody holds [tokens, vocabulary].
    """
    memory = loaded.table.memory
    step = DenseStep.build([prompt], memory)
    entries: list[TokenLogprobs | None] = [None]
    for start in range(0, len(prompt) - 1, PROMPT_CHUNK):
        following = prompt[start + 1 : start + 1 + PROMPT_CHUNK]
        rows = memory.integers(np.arange(start, start + len(following)))
        entries += prompt_logprobs(memory.get(loaded.model(step, rows)), following, count)
    return entries
