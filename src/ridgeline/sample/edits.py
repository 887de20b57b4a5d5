"""Edit the scores of single tokens before they are a distribution: masks, bias, penalties."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from copy import copy
from itertools import count
from typing import Protocol

import numpy as np

from ridgeline.sample.dry import MAX_PENALTY, Dry
from ridgeline.sample.logits import Floats, Ints
from ridgeline.sample.masks import Grammar
from ridgeline.spec.request import SamplingParams


class TokenCounts:
    """Counts how often each token of prompt and answer occurs in the answer. A push costs the same at any length.

    The arrays are in no particular order.
    """

    def __init__(self, prompt: Sequence[int], origin: TokenCounts | None = None) -> None:
        """origin: counts of the same prompt, whose tables are shared."""
        self._ids: Ints = np.unique(np.asarray(prompt, np.int64)) if origin is None else origin._ids
        self._counts: Ints = np.zeros(len(self._ids), np.int64)
        self._prompt: dict[int, int]  # slot of each token of the prompt; does not change
        self._prompt = dict(zip(self._ids.tolist(), count())) if origin is None else origin._prompt
        self._answer: dict[int, int] = {}  # slot of each other token

    def start(self) -> TokenCounts:
        """Return the counts of an empty answer to the same prompt; to be called before the first push."""
        return TokenCounts((), self)

    def push(self, token: int) -> None:
        """Take the next token of the answer."""
        slot = self._prompt.get(token)
        if slot is None:
            slot = self._answer.setdefault(token, self._num_slots)
        if slot == len(self._ids):  # full: double the arrays, so that the average cost of a push is constant
            room = np.zeros(max(16, slot), np.int64)
            self._ids, self._counts = np.append(self._ids, room), np.append(self._counts, room)
        self._ids[slot] = token
        self._counts[slot] += 1

    @property
    def _num_slots(self) -> int:
        return len(self._prompt) + len(self._answer)

    @property
    def ids(self) -> Ints:
        """Return the distinct tokens of prompt and answer [m]."""
        return self._ids[: self._num_slots]

    @property
    def counts(self) -> Ints:
        """Return how often each occurs in the answer [m]; 0 for a token that is only in the prompt."""
        return self._counts[: self._num_slots]


class BadSequences:
    """Finds the tokens that would complete one of the sequences that an answer must not contain.

    It does not change, so that all answers to a request share it. A token costs as much as the sequences whose last
    token but one it is.
    """

    def __init__(self, sequences: Sequence[Sequence[int]]) -> None:
        """sequences: each of at least one token. The tokens of sequences of length 1 are in `always`."""
        self.always = [sequence[0] for sequence in sequences if len(sequence) == 1]
        self._by_last: dict[int, list[tuple[list[int], int]]] = {}  # by the last token but one
        self.longest = 0  # number of tokens in the longest one, without its end
        for *before, end in sequences:
            if before:
                self._by_last.setdefault(before[-1], []).append((before, end))
                self.longest = max(self.longest, len(before))

    def next(self, answer: Sequence[int]) -> list[int]:
        """Return the tokens that would complete a sequence of several tokens. answer: its last `longest` tokens."""
        candidates = self._by_last.get(answer[-1], ()) if answer else ()
        if not candidates:
            return []
        past = list(answer)
        return [end for before, end in candidates if past[-len(before) :] == before]


class Edit(Protocol):
    """Changes the scores of one sequence before they are a distribution."""

    def start(self) -> Edit:
        """Return the edit of another answer to the same prompt, which shares tables; to be called before any push."""
        ...

    def push(self, token: int) -> None:
        """Take the next token of the answer."""
        ...

    def apply(self, scores: Floats) -> None:
        """Edit scores [vocabulary], float64, in place: minus infinity for a token that is ruled out."""
        ...


class Masks:
    """Rules out tokens: allowed_token_ids, bad_token_ids, bad_token_sequences and, at first, the ends of an answer."""

    def __init__(self, params: SamplingParams, ends: Collection[int]) -> None:
        """ends: the tokens that would end the sequence; none of its first min_tokens tokens may be one of them."""
        allowed = params.allowed_token_ids
        self._allowed = None if allowed is None else np.array(allowed, np.int64)
        self._sequences = BadSequences(params.bad_token_sequences)
        self._bad = np.array([*params.bad_token_ids, *self._sequences.always], np.int64)
        self._ends = np.array(sorted(ends), np.int64)
        self._left = params.min_tokens
        self._past = deque[int](maxlen=self._sequences.longest)

    def start(self) -> Masks:
        masks = copy(self)
        masks._past = self._past.copy()
        return masks

    def push(self, token: int) -> None:
        """Take the next token of the answer."""
        self._left -= 1
        self._past.append(token)

    def apply(self, scores: Floats) -> None:
        """Exclude the tokens that are ruled out."""
        if self._allowed is not None:
            kept = scores[self._allowed]
            scores.fill(-np.inf)
            scores[self._allowed] = kept
        scores[self._bad] = -np.inf
        scores[self._sequences.next(self._past)] = -np.inf
        if self._left > 0:
            scores[self._ends] = -np.inf


class Bias:
    """Adds logit_bias."""

    def __init__(self, params: SamplingParams) -> None:
        self._ids = np.array([token for token, _ in params.logit_bias], np.int64)
        self._bias = np.array([bias for _, bias in params.logit_bias], np.float64)

    def start(self) -> Bias:
        return self

    def push(self, token: int) -> None:
        """Do nothing: the bias does not depend on the answer."""

    def apply(self, scores: Floats) -> None:
        """Add the bias."""
        scores[self._ids] += self._bias


class Penalties:
    """Applies repetition_penalty, presence_penalty and frequency_penalty.

    Repetition, over prompt and answer: positive scores are divided by it, others multiplied (arXiv:1909.05858).
    Presence and frequency, over the answer (OpenAI's and vLLM's definition): subtracted once, and for each time.
    """

    def __init__(self, params: SamplingParams, tokens: TokenCounts) -> None:
        self._params, self._tokens = params, tokens

    def start(self) -> Penalties:
        return Penalties(self._params, self._tokens.start())

    def push(self, token: int) -> None:
        """Take the next token of the answer."""
        self._tokens.push(token)

    def apply(self, scores: Floats) -> None:
        """Penalize the tokens of prompt and answer."""
        params, ids, counts = self._params, self._tokens.ids, self._tokens.counts
        factor, found = params.repetition_penalty, scores[self._tokens.ids]
        with np.errstate(over="ignore"):
            changed = np.where(found > 0, found / factor, found * factor)
        changed = changed.clip(-MAX_PENALTY, MAX_PENALTY)
        changed -= params.frequency_penalty * counts + params.presence_penalty * (counts > 0)
        scores[ids] = np.where(found == -np.inf, found, changed)  # a token that is ruled out stays so


class Edits:
    """All edits of one sequence, in the order in which they act: grammar, masks, bias, penalties, DRY."""

    def __init__(self, edits: Sequence[Edit], grammar: Grammar | None = None) -> None:
        self._edits, self._grammar = edits, grammar
        self._matcher = None if grammar is None else grammar.start()

    @classmethod
    def of(
        cls, params: SamplingParams, prompt: Sequence[int], ends: Collection[int], grammar: Grammar | None = None
    ) -> Edits | None:
        """Return the edits that `params` and a grammar call for; None if there are none.

        ends: the tokens that would end the sequence.
        """
        edits: list[Edit] = []
        bad = params.bad_token_ids or params.bad_token_sequences
        if params.allowed_token_ids is not None or bad or (params.min_tokens and ends):
            edits.append(Masks(params, ends))
        if params.logit_bias:
            edits.append(Bias(params))
        if params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0:
            edits.append(Penalties(params, TokenCounts(prompt)))
        if params.dry_multiplier > 0 and params.dry_penalty_last_n != 0:
            edits.append(Dry(params, prompt))
        return cls(edits, grammar) if edits or grammar is not None else None

    def start(self) -> Edits:
        """Return the edits of another answer to the same prompt; to be called before the first push.

        Large tables are shared, so that `n` answers take little more time and memory than one.
        """
        return Edits([edit.start() for edit in self._edits], self._grammar)

    def push(self, token: int) -> None:
        """Take the next token of the answer."""
        if self._matcher is not None:
            self._matcher.push(token)
        for edit in self._edits:
            edit.push(token)

    def prepare(self) -> None:
        """Begin to make what `apply` needs and that takes a while."""
        if self._matcher is not None:
            self._matcher.prepare()

    def wait(self, seconds: float) -> bool:
        """Wait at most `seconds` for what `prepare` began; return whether it is ready."""
        return self._matcher is None or self._matcher.wait(seconds)

    def apply(self, scores: Floats) -> None:
        """Edit scores [vocabulary], float64, in place: minus infinity for a token that is ruled out.

        Waits for what `prepare` began. Raises RequestError if a grammar has become too complex.
        """
        if self._matcher is not None:
            scores[~self._matcher.allowed()[: scores.size]] = -np.inf
        for edit in self._edits:
            edit.apply(scores)
