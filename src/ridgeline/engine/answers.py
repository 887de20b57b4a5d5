"""The answers that an engine computes: their sequences, their sampling state, and the events that tell of them."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from ridgeline.errors import RequestError
from ridgeline.runtime.generator import Event
from ridgeline.runtime.sampling import PromptTokens
from ridgeline.sample.sampler import SampleRow
from ridgeline.sched.sequence import Sequence
from ridgeline.sched.work import Result, Work
from ridgeline.spec.request import FinishReason, TokenLogprobs


@dataclass(slots=True)
class OpenRequest:
    """A request that is not complete.

    choices: the sequence id of each answer. open: the sequence ids of answers that are not over. num_logprobs: number
    of likeliest tokens to report at each position of the prompt; None if they are not wanted, or were reported.
    entries: log probabilities of the prompt's tokens after the first. num_asked: entries that steps were asked for.
    """

    prompt: list[int]
    choices: list[int]
    open: set[int]
    num_logprobs: int | None = None
    entries: list[TokenLogprobs] = field(default_factory=list)
    num_asked: int = 0

    def prompt_tokens(self, work: Work, first: int) -> PromptTokens | None:
        """Return the prompt tokens that a work can score and none has scored before; first: the index of its first row.

        After a preemption some tokens of the prompt are computed again.
        """
        if self.num_logprobs is None:
            return None
        skip = self.num_asked - work.start
        following = self.prompt[work.start + 1 : work.start + len(work.tokens) + 1][skip:]
        self.num_asked += len(following)
        return PromptTokens(first + skip, following, self.num_logprobs) if following else None

    def take_entries(self) -> tuple[TokenLogprobs, ...] | None:
        """Return all entries at the first call; None after it, or if they are not wanted."""
        if self.num_logprobs is None:
            return None
        self.num_logprobs = None
        return tuple(self.entries)


@dataclass(slots=True)
class Answer:
    """One answer to a request.

    scheduled: when its first step began (time.perf_counter). waited: seconds that it waited for late masks.
    """

    request: int
    index: int
    row: SampleRow
    sequence: Sequence
    scheduled: float | None = None
    waited: float = 0.0

    @property
    def needs_host(self) -> bool:
        """Return whether its logits are edited, so that the host must sample it."""
        return self.row.edits is not None

    def device_row(self, work: Work) -> SampleRow:
        """Return a row without edits at the first position that a work samples."""
        row = self.row
        return SampleRow(row.params, row.noise, _position(work), row.eos, row.ends, None, row.filters)

    def draft_row(self) -> SampleRow:
        """Return the row that draws drafts, at the position of the next token: without edits, which cost more."""
        row, position = self.row, len(self.sequence.tokens)
        return SampleRow(row.params, row.noise, position, row.eos, row.ends, None, row.filters)

    def record(self, tokens: Seq[int]) -> None:
        """Begin to make the next mask, after tokens that the row was told of."""
        if not self.row.is_end(tokens[-1]) and self.row.position < self.sequence.max_length:
            self.row.prepare()

    def event(self, result: Result, finished: bool, entries: tuple[TokenLogprobs, ...] | None) -> Event:
        """Return the event for tokens that were committed. entries: the prompt's, on the event that reports them."""
        reason: FinishReason | None = None
        stop: int | None = None
        if finished:
            last = result.tokens[-1]
            reason, stop = ("stop", self.row.stop_reason(last)) if self.row.is_end(last) else ("length", None)
        return Event(
            self.request, self.index, result.tokens, result.logprobs, reason, stop,
            num_cached_tokens=self.sequence.num_cached, num_preempted=self.sequence.num_preempted,
            prompt_logprobs=entries, scheduled=self.scheduled,
        )  # fmt: skip

    def failure(self, error: RequestError, entries: tuple[TokenLogprobs, ...] | None) -> Event:
        """Return the event of an answer that ends with an error."""
        return Event(
            self.request, self.index, finish_reason="error", error=error, prompt_logprobs=entries,
            num_preempted=self.sequence.num_preempted,
        )  # fmt: skip


def _position(work: Work) -> int:
    """Return the position of the first token that a work samples."""
    return work.start + len(work.tokens) - work.num_draft
