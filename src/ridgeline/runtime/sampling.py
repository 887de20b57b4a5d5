"""Sample the rows of one step from its logits: drafts are accepted up to the first one that is rejected."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np

from ridgeline.errors import RequestError
from ridgeline.sample.acceptance import pick_of
from ridgeline.sample.logits import Floats, Ints
from ridgeline.sample.rejection import Distribution, Draft
from ridgeline.sample.sampler import Best, Pick, SampleRow, sample, take_best
from ridgeline.sched.work import Result, Work
from ridgeline.spec.acceptance import Acceptance
from ridgeline.spec.request import TokenLogprobs

PATIENCE_SECONDS = 0.002  # a step waits so long for masks; most of them take a tenth of that

# A row that the host samples: one with edits, or a function that takes a row of logits [1, vocabulary] (beam search).
HostRow = SampleRow | Callable[[Floats], None]


@dataclass(frozen=True, slots=True)
class PromptTokens:
    """Prompt tokens whose log probabilities are wanted.

    first: index of the row of logits, among the step's tokens, that predicts the first of them. following: the tokens.
    count: the number of likeliest tokens to report for each.
    """

    first: int
    following: Sequence[int]
    count: int


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a runner samples the works of a step.

    rows: for each work the row that it samples, at the position of the next token; None where it samples nothing, or
    where the host does. The runner may change these rows. prompts: prompt tokens to score, by the index of the work. q:
    the distributions that a work's drafts were drawn from, by its index; a work without them has point masses.
    """

    rows: Sequence[SampleRow | None]
    prompts: Mapping[int, PromptTokens] = field(default_factory=dict)
    q: Mapping[int, Sequence[Distribution]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Late:
    """A row whose mask was not ready when its logits were.

    logits: logits of the next token [vocabulary]. since: when they were ready (time.perf_counter).
    """

    logits: Floats
    since: float


@dataclass(slots=True)
class Target:
    """A work that is being sampled.

    at: the row of the logits for its next token. drafts: the drafts of the work. acceptance: how they are accepted. q:
    the distributions that they were drawn from; None: point masses. tokens, logprobs: sampled so far.
    """

    row: SampleRow
    at: int
    drafts: tuple[int, ...]
    acceptance: Acceptance = "same"
    q: Sequence[Distribution] | None = None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    error: RequestError | None = None
    late: Late | None = None

    def result(self) -> Result:
        """Return what the work gave."""
        ended = bool(self.tokens) and self.row.is_end(self.tokens[-1])
        return Result(tuple(self.tokens), ended, tuple(self.logprobs), self.error)

    def next_row(self) -> int:
        """Return the row of the logits for the next token."""
        return self.at + len(self.tokens)

    def pick(self) -> Pick:
        """Return how the next token is taken from its scores."""
        at = len(self.tokens)
        if at >= len(self.drafts):
            return pick_of(self.acceptance, None)
        return pick_of(self.acceptance, Draft(self.drafts[at], None if self.q is None else self.q[at]))

    def wants_more(self) -> bool:
        """Return whether the last token is the draft at its position, so that the next logits are right as well."""
        last = len(self.tokens) - 1
        return last < len(self.drafts) and self.tokens[-1] == self.drafts[last] and not self.row.is_end(self.tokens[-1])


def sample_targets(logits: Floats, targets: Sequence[Target]) -> None:
    """Sample all works token by token, until a draft is rejected, a mask is late, or there is an error.

    logits [n, vocabulary] of a step. An error or a late mask after an accepted draft is dropped: the next step begins
    with that token and finds it again.
    """
    until = time.perf_counter() + PATIENCE_SECONDS
    going = list(targets)
    while going:
        going = _in_time(logits, going, until)
        if not going:
            return
        at = [target.next_row() for target in going]
        whole = len(at) == len(logits) and at == list(range(len(at)))
        results = sample(logits if whole else logits[at], [target.row for target in going], [t.pick() for t in going])
        for target, result in zip(going, results, strict=True):
            if isinstance(result, RequestError):
                target.error = None if target.tokens else result
                continue
            target.tokens.append(result.token)
            target.row.push(result.token)
            if result.logprobs is not None:
                target.logprobs.append(result.logprobs)
        going = [
            target
            for target, result in zip(going, results, strict=True)
            if not isinstance(result, RequestError) and target.wants_more()
        ]


def _in_time(logits: Floats, going: Sequence[Target], until: float) -> list[Target]:
    """Return the targets whose masks are ready by `until`; the others are late."""
    left = []
    for target in going:
        if target.row.wait(until - time.perf_counter()):
            left.append(target)
        elif not target.tokens:
            target.late = Late(logits[target.at].copy(), time.perf_counter())
    return left


def best_results(best: Best, rows: Sequence[SampleRow], works: Sequence[Work]) -> list[Result]:
    """Return a result for each work of a step whose rows want their best token and nothing more.

    best: the best token of each of the step's tokens; a work has one token and its drafts.
    """
    found, results, at = take_best(best), [], 0
    for row, work in zip(rows, works, strict=True):
        tokens: list[int] = []
        for one, draft in zip(found[at : at + len(work.tokens)], (*work.tokens[1:], None), strict=True):
            if isinstance(one, RequestError):
                break
            tokens.append(one.token)
            if one.token != draft or row.is_end(one.token):
                break
        first = found[at]
        error = first if isinstance(first, RequestError) else None
        results.append(Result(tuple(tokens), bool(tokens) and row.is_end(tokens[-1]), error=error))
        at += len(work.tokens)
    return results


def sampled_rows(works: Sequence[Work]) -> Ints | None:
    """Return the indices of a step's tokens whose logits are sampled: each last known token and its drafts; None: all.

    Works that do not sample have none.
    """
    if all(w.sample and len(w.tokens) == w.num_draft + 1 for w in works):
        return None
    ends = accumulate(len(w.tokens) for w in works)
    rows = [np.arange(end - w.num_draft - 1, end) for w, end in zip(works, ends, strict=True) if w.sample]
    return np.concatenate(rows)
