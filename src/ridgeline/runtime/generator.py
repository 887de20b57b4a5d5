"""The interface of a generator, and its requests and events: the engine, static batches, naive sampling."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from ridgeline.errors import RequestError
from ridgeline.sample.logits import Floats
from ridgeline.sample.masks import Grammar
from ridgeline.sample.sampler import NoiseKey, prompt_logprobs
from ridgeline.sched.stats import Stats, StepShape
from ridgeline.spec.request import BeamSearchParams, FinishReason, Params, SamplingParams, TokenLogprobs

if TYPE_CHECKING:
    from ridgeline.sample.grammar import Grammars

PROMPT_CHUNK = 256  # positions whose logits are in memory at once, for prompt_logprobs


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A prompt as token ids, and how to continue it.

    noise: a random key for each answer that is sampled. prompt: its text, if there was one. priority: lower is more
    urgent. cache_salt: only requests with the same salt share computed prefixes. grammar: the compiled
    structured_outputs of params. lora: the name of the adapter that answers; empty: the model itself.
    """

    prompt_token_ids: Sequence[int]
    params: Params
    noise: tuple[NoiseKey, ...]
    prompt: str | None = None
    priority: int = 0
    cache_salt: str = ""
    grammar: Grammar | None = None
    lora: str = ""

    @property
    def num_answers(self) -> int:
        """Return the number of answers that the request wants."""
        return self.params.answers if isinstance(self.params, BeamSearchParams) else self.params.n

    def with_grammar(self, grammars: Grammars) -> GenerationRequest:
        """Return the request with its structured outputs compiled, if it has some and no grammar yet.

        Raises RequestError as `Grammars.compile` does.
        """
        params = self.params
        if not isinstance(params, SamplingParams) or params.structured_outputs is None or self.grammar is not None:
            return self
        return replace(self, grammar=grammars.compile(params.structured_outputs))


@dataclass(frozen=True, slots=True)
class Event:
    """New tokens of one answer to a request, or the error that ended it.

    finish_reason: set on the answer's last event. num_cached_tokens: prompt tokens found in the prefix cache.
    prompt_logprobs: an entry for each prompt token after the first, on one event of a request that wants them. score:
    set for an answer of a beam search, which comes whole. scheduled: when its first step began (time.perf_counter).
    num_preempted: how often it was preempted so far; 0 for an answer of a beam search. num_passes: passes of a
    diffusion model over blocks of the answer so far.
    """

    request: int
    choice: int
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    error: RequestError | None = None
    num_cached_tokens: int = 0
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    score: float | None = None
    scheduled: float | None = None
    num_preempted: int = 0
    num_passes: int = 0


class Generator(Protocol):
    """Answers any number of requests at once. Not for several threads at once."""

    def __len__(self) -> int:
        """Return the number of requests that are not complete."""
        ...

    def add(self, request_id: int, request: GenerationRequest) -> None:
        """Queue a request under an id that the caller chooses. Raises RequestError if it can never fit."""
        ...

    def step(self) -> list[Event]:
        """Run one step; the events of answers, in order."""
        ...

    def finish(self, request_id: int, choice: int) -> None:
        """End one answer: a stop string was found in its text. No event follows."""
        ...

    def abort(self, request_id: int) -> None:
        """End a request at any moment. No event follows; nothing happens if it was complete."""
        ...

    def reset(self) -> None:
        """Forget all requests. Needed after an exception in the middle of a step."""
        ...

    def stats(self) -> Stats | None:
        """Return pages, prefix hits and preemptions; None for a generator without a cache."""
        ...

    def last_step(self) -> StepShape:
        """Return what the last step computed; () for nothing, or if it is not known. Called after every step."""
        ...

    def check(self) -> None:
        """Raise AssertionError if the bookkeeping is inconsistent."""
        ...


def prompt_entries(
    logits: Callable[[int, int], Floats], first: int, following: Sequence[int], count: int
) -> Iterator[TokenLogprobs]:
    """Yield log probabilities of prompt tokens, and of the `count` likeliest tokens at each position.

    following: the tokens that rows first, first + 1, ... of a step predict. logits(first, n): returns the logits of n
    rows [n, vocabulary]. It is called for PROMPT_CHUNK rows at a time, to bound the memory.
    """
    for start in range(0, len(following), PROMPT_CHUNK):
        tokens = following[start : start + PROMPT_CHUNK]
        yield from prompt_logprobs(logits(first + start, len(tokens)), tokens, count)
