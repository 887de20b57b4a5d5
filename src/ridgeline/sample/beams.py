"""Beam search: the most likely answers, not drawn ones (Sutskever et al. 2014, arXiv:1409.3215).

`BeamSearch` is one request's search without its model: each step it takes the best next tokens of every live beam
(`top_candidates`, row by row, in whatever forward passes they come) and says which beams live on. Answers and scores
are those of `generate(num_beams=..., do_sample=False)` of transformers 5.

A hypothesis is an answer that ended. Its score is the sum of its tokens' log probabilities, divided by the number of
these tokens, the end token among them but not the prompt, to the power of length_penalty. What transformers does, and
one might not expect:

- A candidate that ends is kept only if it is among the best beam_width of all candidates of its step; else it is lost.
- At max_tokens the best beam_width candidates become hypotheses beside the finished ones, ended or not, so that an
  answer that was cut off can beat one that ended.
- The search stops by the worst of beam_width hypotheses, even if fewer answers are asked for; and with early_stopping
  False by what the best beam would score at its present length, although with a length_penalty above 0 it may gain.

Ties, whose order transformers leaves open, go to the older hypothesis, the better beam, the lower token id. Where
fewer than beam_width candidates are possible, transformers goes on with beams of score -1e9, and takes a score below
that (a long answer under a negative length_penalty) for none at all; here such beams do not exist, and no score is
too low.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from ridgeline.errors import RequestError
from ridgeline.sample.logits import Floats, row_logprobs
from ridgeline.sample.sampler import BLOCK
from ridgeline.spec.request import BeamSearchParams

Candidates = tuple[tuple[int, float], ...]  # next tokens of one beam with their log probabilities, best first


@dataclass(frozen=True, slots=True)
class Branch:
    """A live beam of the next step: the index of the live beam that it continues, and the token that it adds."""

    parent: int
    token: int


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """An answer: its tokens with the one that ended it, and its score. finished: False if max_tokens cut it off."""

    tokens: tuple[int, ...]
    score: float
    finished: bool


@dataclass(frozen=True, slots=True)
class _Beam:
    """Tokens of an answer so far; logprob: of all of them together."""

    tokens: tuple[int, ...]
    logprob: float


def top_candidates(logits: Floats, count: int) -> list[Candidates | RequestError]:
    """The `count` most likely next tokens after each row, or why there are none: the error is that row's alone.

    logits [n, vocabulary], float32; they are not changed. Fewer than `count` where fewer have a probability above zero.
    A row's candidates are the same, bit for bit, whatever the other rows are.
    """
    good = np.flatnonzero(np.isfinite(logits.max(axis=1)))
    found: list[Candidates | RequestError] = [RequestError("the model's logits hold NaN or infinity")] * len(logits)
    size = max(1, BLOCK // logits.shape[1])
    for start in range(0, len(good), size):
        rows = good[start : start + size]
        entries = row_logprobs(logits[rows], [0] * len(rows), [count] * len(rows))
        for row, entry in zip(rows, entries, strict=True):
            found[row] = entry.top
    return found


class BeamSearch:
    """One request's search. At first one beam is live: the prompt.

    Until `done`, each step: `advance` with the top `count` candidates of every live beam; the branches that it returns
    are the live beams from then on.

    eos: the model's end-of-sequence tokens. max_tokens: the most tokens an answer may have, at least 1; it takes the
    place of params.max_tokens, which may be None, because only the caller knows how long the context is.
    """

    def __init__(self, params: BeamSearchParams, eos: Collection[int], max_tokens: int) -> None:
        self._params = params
        self._ends = frozenset(() if params.ignore_eos else eos).union(params.stop_token_ids)
        self._max_tokens = max_tokens
        self._length = 0  # tokens of every live beam
        self._live = [_Beam((), 0.0)]  # best first, as the hypotheses
        self._hypotheses: list[Hypothesis] = []

    @property
    def count(self) -> int:
        """How many candidates of each live beam to give: enough that beam_width of them do not end it."""
        return self._params.beam_width + len(self._ends)

    @property
    def done(self) -> bool:
        """Whether the results are final."""
        return not self._live

    def advance(self, candidates: Sequence[Candidates]) -> list[Branch]:
        """One step: candidates of every live beam, in the order of the beams. Returns the next live beams, best first.

        No branches are returned when the search is done.
        """
        if len(candidates) != len(self._live):
            raise ValueError(f"candidates of {len(candidates)} beams; {len(self._live)} are live")
        width = self._params.beam_width
        ranked = [
            (beam.logprob + logprob, Branch(parent, token))
            for parent, (beam, best) in enumerate(zip(self._live, candidates, strict=True))
            for token, logprob in best
        ]
        ranked.sort(key=lambda found: -found[0])
        self._length += 1
        last = self._length >= self._max_tokens
        ended = [self._end(logprob, b) for logprob, b in ranked[:width] if last or b.token in self._ends]
        self._hypotheses = sorted([*self._hypotheses, *ended], key=lambda h: -h.score)[:width]
        kept = [] if last else [(logprob, b) for logprob, b in ranked if b.token not in self._ends][:width]
        self._live = [_Beam((*self._live[b.parent].tokens, b.token), logprob) for logprob, b in kept]
        if self._nothing_to_gain():
            self._live = []
        return [b for _, b in kept] if self._live else []

    def results(self) -> list[Hypothesis]:
        """The answers that were asked for, best first; before the search is done, the best so far.

        Fewer than asked for only where fewer have a probability above zero.
        """
        return self._hypotheses[: self._params.answers]

    def _end(self, logprob: float, branch: Branch) -> Hypothesis:
        tokens = (*self._live[branch.parent].tokens, branch.token)
        return Hypothesis(tokens, self._score(logprob, self._length), branch.token in self._ends)

    def _score(self, logprob: float, length: int) -> float:
        return float(logprob / length**self._params.length_penalty)

    def _nothing_to_gain(self) -> bool:
        """Whether no live beam is expected to become better than the worst hypothesis."""
        params = self._params
        if not self._live or len(self._hypotheses) < params.beam_width:
            return False
        if params.early_stopping is True:
            return True
        longest = params.early_stopping == "never" and params.length_penalty > 0
        best = self._score(self._live[0].logprob, self._max_tokens if longest else self._length)
        return best <= self._hypotheses[-1].score
