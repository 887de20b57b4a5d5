"""What a generator takes and gives, whichever way it computes: the engine, static batches, naive sampling."""

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

PROMPT_CHUNK = 256  # positions whose logits are held at once, for prompt_logprobs


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A prompt, as ids, and how to continue it.

    noise: a key for each answer that is sampled. prompt: the text, if there was one. priority: lower is more urgent.
    cache_salt: requests share computed prefixes only under the same one. grammar: the structured_outputs of params,
    compiled.
    """

    prompt_token_ids: Sequence[int]
    params: Params
    noise: tuple[NoiseKey, ...]
    prompt: str | None = None
    priority: int = 0
    cache_salt: str = ""
    grammar: Grammar | None = None

    @property
    def num_answers(self) -> int:
        """How many answers are asked for."""
        return self.params.answers if isinstance(self.params, BeamSearchParams) else self.params.n

    def with_grammar(self, grammars: Grammars) -> GenerationRequest:
        """Return the request with its structured outputs compiled, if it asks for them and has no grammar yet.

        Raises RequestError as `Grammars.compile` does.
        """
        params = self.params
        if not isinstance(params, SamplingParams) or params.structured_outputs is None or self.grammar is not None:
            return self
        return replace(self, grammar=grammars.compile(params.structured_outputs))


@dataclass(frozen=True, slots=True)
class Event:
    """What became of one answer to a request: new tokens, or the error that ended it.

    finish_reason: set on the answer's last event. num_cached_tokens: of the prompt, found in the prefix cache.
    prompt_logprobs: once per request that asks for them, an entry for each prompt token but the first. score: of an
    answer that was searched for, which comes whole. scheduled: when its first step began (time.perf_counter).
    num_preempted: how often it had to make room so far; 0 of one that was searched for.
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


class Generator(Protocol):
    """Continues prompts, any number at once. Not for several threads at once."""

    def __len__(self) -> int:
        """Requests that are not complete."""
        ...

    def add(self, request_id: int, request: GenerationRequest) -> None:
        """Queue a request under an id of the caller's. Raises RequestError, and queues nothing, if it can never fit."""
        ...

    def step(self) -> list[Event]:
        """Compute for a while; what became of the answers, in order."""
        ...

    def finish(self, request_id: int, choice: int) -> None:
        """End one answer: a stop string was found in its text. No event follows."""
        ...

    def abort(self, request_id: int) -> None:
        """End a request at any moment. No event follows; nothing happens if it was complete."""
        ...

    def reset(self) -> None:
        """Forget all requests; the way out of an exception in the middle of a step."""
        ...

    def stats(self) -> Stats | None:
        """Pages, prefix hits and preemptions; None for one that keeps nothing."""
        ...

    def last_step(self) -> StepShape:
        """What the last step computed; () for nothing, or where that is not told. Cheap: asked after every step."""
        ...

    def check(self) -> None:
        """Raise AssertionError if the books do not agree."""
        ...


def prompt_entries(
    logits: Callable[[int, int], Floats], first: int, following: Sequence[int], count: int
) -> Iterator[TokenLogprobs]:
    """Log probabilities of the tokens `following` a run of rows that begins at `first`, and of the `count` likeliest.

    logits(first, n): those of n rows [n, vocabulary]. Chunk by chunk: nobody holds [tokens, vocabulary].
    """
    for start in range(0, len(following), PROMPT_CHUNK):
        tokens = following[start : start + PROMPT_CHUNK]
        yield from prompt_logprobs(logits(first + start, len(tokens)), tokens, count)
