"""What a request does to the scores of single tokens before they are a distribution: masks, bias, penalties."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence

import numpy as np

from ridgeline.sample.logits import Floats, Ints
from ridgeline.sample.masks import Grammar
from ridgeline.spec.request import SamplingParams

# So that differences of scores stay finite under absurd penalties.
_LIMIT = float(np.finfo(np.float64).max / 4)


class TokenCounts:
    """How often each token came in an answer, for the tokens of prompt and answer. A push costs the same at any length.

    The arrays are in no particular order.
    """

    def __init__(self, prompt: Sequence[int]) -> None:
        self._ids: Ints = np.unique(np.asarray(prompt, np.int64))
        self._counts: Ints = np.zeros(len(self._ids), np.int64)
        self._slots = {int(token): slot for slot, token in enumerate(self._ids)}

    def push(self, token: int) -> None:
        """One more token of the answer."""
        slot = self._slots.setdefault(token, len(self._slots))
        if slot == len(self._ids):  # full: twice the room, so that growing costs nothing on average
            room = np.zeros(max(16, slot), np.int64)
            self._ids, self._counts = np.append(self._ids, room), np.append(self._counts, room)
        self._ids[slot] = token
        self._counts[slot] += 1

    @property
    def ids(self) -> Ints:
        """[m] the distinct tokens of prompt and answer."""
        return self._ids[: len(self._slots)]

    @property
    def counts(self) -> Ints:
        """[m] how often each came in the answer; 0 for one that is only in the prompt."""
        return self._counts[: len(self._slots)]


class BadSequences:
    """Sequences of tokens that an answer must not contain: what may not come next.

    A push and a look cost what the sequences take whose last token but one has just come.
    """

    def __init__(self, sequences: Sequence[Sequence[int]]) -> None:
        """`sequences`: each of at least one token. Those of one token may never come."""
        self.always = [sequence[0] for sequence in sequences if len(sequence) == 1]
        self._by_last: dict[int, list[tuple[list[int], int]]] = {}  # of what comes before the last token
        longest = 0
        for *before, end in sequences:
            if before:
                self._by_last.setdefault(before[-1], []).append((before, end))
                longest = max(longest, len(before))
        self._past = deque[int](maxlen=longest)

    def push(self, token: int) -> None:
        """One more token of the answer."""
        self._past.append(token)

    def next(self) -> list[int]:
        """The tokens that would complete a sequence of several tokens."""
        candidates = self._by_last.get(self._past[-1], ()) if self._past else ()
        if not candidates:
            return []
        past = list(self._past)
        return [end for before, end in candidates if past[-len(before) :] == before]


class Edits:
    """The masks, the bias and the penalties of one sequence, in this order."""

    def __init__(
        self, params: SamplingParams, prompt: Sequence[int], ends: Collection[int], grammar: Grammar | None = None
    ) -> None:
        """`ends`: the tokens that would end the sequence, which its first min_tokens tokens may not be."""
        self._params = params
        self._matcher = None if grammar is None else grammar.start()
        allowed = params.allowed_token_ids
        self._allowed = None if allowed is None else np.array(allowed, np.int64)
        self._sequences = BadSequences(params.bad_token_sequences)
        self._bad = np.array([*params.bad_token_ids, *self._sequences.always], np.int64)
        self._ends = np.array(sorted(ends), np.int64)
        self._bias_ids = np.array([token for token, _ in params.logit_bias], np.int64)
        self._bias = np.array([bias for _, bias in params.logit_bias], np.float64)
        self._produced = 0
        self._counts = TokenCounts(prompt) if _penalizes(params) else None

    @classmethod
    def of(
        cls, params: SamplingParams, prompt: Sequence[int], ends: Collection[int], grammar: Grammar | None = None
    ) -> Edits | None:
        """The edits that `params` and a grammar ask for; None where they ask for none."""
        bad = params.bad_token_ids or params.bad_token_sequences
        masks = params.allowed_token_ids is not None or bad or (params.min_tokens and ends) or grammar
        return cls(params, prompt, ends, grammar) if masks or params.logit_bias or _penalizes(params) else None

    def push(self, token: int) -> None:
        """One more token of the answer."""
        self._produced += 1
        self._sequences.push(token)
        if self._matcher is not None:
            self._matcher.push(token)
        if self._counts is not None:
            self._counts.push(token)

    def prepare(self) -> None:
        """Begin to make what `apply` needs and that takes a while."""
        if self._matcher is not None:
            self._matcher.prepare()

    def wait(self, seconds: float) -> bool:
        """Wait for what `prepare` began, but not longer; is it there?"""
        return self._matcher is None or self._matcher.wait(seconds)

    def apply(self, scores: Floats) -> None:
        """Edit scores [vocabulary], float64, in place: minus infinity for what is ruled out.

        Raises RequestError where a grammar has become too complex to go on. Waits for what `prepare` began.
        """
        if self._matcher is not None:
            scores[~self._matcher.allowed()[: scores.size]] = -np.inf
        if self._allowed is not None:
            kept = scores[self._allowed]
            scores.fill(-np.inf)
            scores[self._allowed] = kept
        scores[self._bad] = -np.inf
        scores[self._sequences.next()] = -np.inf
        if self._produced < self._params.min_tokens:
            scores[self._ends] = -np.inf
        scores[self._bias_ids] += self._bias
        if self._counts is not None:
            penalize(scores, self._counts, self._params)


def penalize(scores: Floats, tokens: TokenCounts, params: SamplingParams) -> None:
    """Apply the penalties to scores [vocabulary] in place.

    Repetition, over prompt and answer: positive scores are divided by it, others multiplied (arXiv:1909.05858).
    Presence and frequency, over the answer (OpenAI's and vLLM's definition): subtracted once, and for each time.
    """
    ids, counts, factor = tokens.ids, tokens.counts, params.repetition_penalty
    found = scores[ids]
    with np.errstate(over="ignore"):
        changed = np.where(found > 0, found / factor, found * factor)
    changed = changed.clip(-_LIMIT, _LIMIT) - params.frequency_penalty * counts - params.presence_penalty * (counts > 0)
    scores[ids] = np.where(found == -np.inf, found, changed)  # what is ruled out stays so


def _penalizes(params: SamplingParams) -> bool:
    return params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0
