"""Search for the most likely answers with beams, instead of sampling (Sutskever et al. 2014, arXiv:1409.3215).

`BeamSearch` is the search of one request, without the model. In each step it gets the best next tokens of every live
beam (`top_candidates`), from any number of forward passes, and returns the next live beams. Answers and scores equal
those of `generate(num_beams=..., do_sample=False)` of transformers 5.

A hypothesis is an answer that ended. Its score is the sum of its tokens' log probabilities, divided by the number of
these tokens to the power of length_penalty; the end token counts, the prompt does not. Some of transformers' rules are
surprising:

- A candidate that ends is kept only if it is among the best beam_width candidates of its step.
- At max_tokens the best beam_width candidates become hypotheses beside the finished ones, ended or not, so an
  answer that was cut off can beat one that ended.
- The worst of beam_width hypotheses decides when the search stops, even if fewer answers are requested. With
  early_stopping False it is compared with the best beam at its present length, although that beam could still gain
  under a length_penalty above 0.

Ties, whose order transformers does not define, go to the older hypothesis, the better beam, the lower token id. If
fewer than beam_width candidates are possible, transformers continues with beams of score -1e9 and ignores lower scores
(a long answer under a negative length_penalty). Here such beams do not exist, and no score is too low.
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
    """A live beam of the next step: the index of the beam that it continues, and the token that it adds."""

    parent: int
    token: int


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """An answer: its tokens, the end token included, and its score. finished: False if max_tokens cut it off."""

    tokens: tuple[int, ...]
    score: float
    finished: bool


@dataclass(frozen=True, slots=True)
class _Beam:
    """The tokens of an answer so far. logprob: the sum of their log probabilities."""

    tokens: tuple[int, ...]
    logprob: float


def top_candidates(logits: Floats, count: int) -> list[Candidates | RequestError]:
    """Return the `count` most likely next tokens of each row, or the error of a row that has none.

    logits [n, vocabulary], float32; they are not changed. Tokens of probability zero are left out.
    A row's candidates do not depend on the other rows, bit for bit.
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
    """The search of one request. At first one beam is live: the prompt.

    In each step until `done`, call `advance` with the top `count` candidates of every live beam. The branches that it
    returns are the next live beams.

    eos: the model's end-of-sequence tokens. max_tokens: largest number of tokens in an answer, at least 1. It is used
    instead of params.max_tokens, which may be None, because only the caller knows the length of the context.
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
        """Return how many candidates of each live beam are needed: enough that beam_width of them do not end it."""
        return self._params.beam_width + len(self._ends)

    @property
    def done(self) -> bool:
        """Return whether the results are final."""
        return not self._live

    def advance(self, candidates: Sequence[Candidates]) -> list[Branch]:
        """Take one step and return the next live beams, best first; none if the search is done.

        candidates: the best next tokens of every live beam, in the order of the beams.
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
        """Return the requested answers, best first; before the search is done, the best so far.

        Answers of probability zero are left out.
        """
        return self._hypotheses[: self._params.answers]

    def _end(self, logprob: float, branch: Branch) -> Hypothesis:
        tokens = (*self._live[branch.parent].tokens, branch.token)
        return Hypothesis(tokens, self._score(logprob, self._length), branch.token in self._ends)

    def _score(self, logprob: float, length: int) -> float:
        return float(logprob / length**self._params.length_penalty)

    def _nothing_to_gain(self) -> bool:
        """Return whether no live beam is expected to become better than the worst hypothesis."""
        params = self._params
        if not self._live or len(self._hypotheses) < params.beam_width:
            return False
        if params.early_stopping is True:
            return True
        longest = params.early_stopping == "never" and params.length_penalty > 0
        best = self._score(self._live[0].logprob, self._max_tokens if longest else self._length)
        return best <= self._hypotheses[-1].score
