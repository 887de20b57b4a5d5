"""Sample the rows of one step from its logits: drafts are accepted up to the first one that is rejected."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np

from ridgeline.errors import RequestError
from ridgeline.sample.acceptance import pick_of
from ridgeline.sample.logits import Floats, Ints
from ridgeline.sample.rejection import Distribution, Draft
from ridgeline.sample.sampler import Best, Pick, SampleRow, sample, take_best
from ridgeline.sched.work import Result, Work
from ridgeline.spec.acceptance import Acceptance
from ridgeline.spec.request import TokenLogprobs
from ridgeline.spec.trees import ROOT, child_with, children

PATIENCE_SECONDS = 0.002  # a step waits so long for masks; most of them take a tenth of that

# A row that the host samples: one with edits, or a function that takes the logits of a work and may return its result:
# [n, vocabulary] for beam search, and sample.logit_rows.LogitRows for passes of diffusion models.
HostRow = SampleRow | Callable[[Any], Result | None]


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
    the distributions that they were drawn from; None: point masses. parents: the parents of drafts in a tree; ():
    a chain. tokens, logprobs: sampled so far. path: indices of the drafts that were accepted so far.
    """

    row: SampleRow
    at: int
    drafts: tuple[int, ...]
    acceptance: Acceptance = "same"
    q: Sequence[Distribution] | None = None
    parents: tuple[int, ...] = ()
    tokens: list[int] = field(default_factory=list)
    path: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    error: RequestError | None = None
    late: Late | None = None

    def result(self) -> Result:
        """Return what the work gave."""
        ended = bool(self.tokens) and self.row.is_end(self.tokens[-1])
        path = tuple(self.path[: len(self.tokens) - 1]) if self.parents else ()
        return Result(tuple(self.tokens), ended, tuple(self.logprobs), self.error, path=path)

    def next_row(self) -> int:
        """Return the row of the logits for the next token."""
        return self.at + 1 + self._node

    @property
    def _node(self) -> int:
        """Return the index of the last draft that was accepted."""
        return self.path[-1] if self.path else ROOT

    def pick(self) -> Pick:
        """Return how the next token is taken from its scores."""
        next_ones = children(self.parents, len(self.drafts), self._node)
        drafts = [Draft(self.drafts[i], None if self.q is None else self.q[i]) for i in next_ones]
        return pick_of(self.acceptance, drafts)

    def advance(self) -> bool:
        """Return whether the last token is a draft at its position, so that the next logits are right as well."""
        last = self.tokens[-1]
        if self.row.is_end(last) or (node := child_with(self.parents, self.drafts, self._node, last)) is None:
            return False
        self.path.append(node)
        return True


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
            if not isinstance(result, RequestError) and target.advance()
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
    """Return a result for each of some works: a draft is accepted if it is the token that was found at its position.

    best: the best token, or the one that was drawn, of each row of logits of the works (`Work.num_rows`).
    """
    found, results, at = take_best(best), [], 0
    for row, work in zip(rows, works, strict=True):
        tokens, path, drafts = list[int](), list[int](), work.tokens[len(work.tokens) - work.num_draft :]
        node: int | None = ROOT
        while node is not None and not isinstance(one := found[at + 1 + node], RequestError):
            if node != ROOT:
                path.append(node)
            tokens.append(one.token)
            node = None if row.is_end(one.token) else child_with(work.parents, drafts, node, one.token)
        first = found[at]
        error = first if isinstance(first, RequestError) else None
        ended = bool(tokens) and row.is_end(tokens[-1])
        results.append(Result(tuple(tokens), ended, error=error, path=tuple(path) if work.parents else ()))
        at += work.num_rows
    return results


def sampled_rows(works: Sequence[Work], skipped: Collection[int] = ()) -> Ints | None:
    """Return the indices of a step's tokens whose logits are sampled: each last known token and its drafts; None: all.

    Works that do not sample have none, nor do works that are skipped, by their index.
    """
    if not skipped and all(w.sample and w.wanted is None and len(w.tokens) == w.num_draft + 1 for w in works):
        return None
    return rows_of(works, {i for i, work in enumerate(works) if work.sample and i not in skipped})


def rows_of(works: Sequence[Work], chosen: Collection[int]) -> Ints:
    """Return the indices of a step's tokens whose logits are sampled for the chosen works, by their index."""
    ends = accumulate(len(work.tokens) for work in works)
    pairs = enumerate(zip(works, ends, strict=True))
    return np.concatenate([np.array(work.rows) + end - len(work.tokens) for i, (work, end) in pairs if i in chosen])
