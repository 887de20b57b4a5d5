"""DRY ("don't repeat yourself"): penalize tokens that would continue a repetition, the more the longer it is.

The definition is that of text-generation-webui (oobabooga/text-generation-webui#5677) and llama.cpp. If the last L
tokens also occur earlier in the sequence, the token that followed them there loses

    dry_multiplier * dry_base ** (L - dry_allowed_length)

from its score, for the longest such L of at least dry_allowed_length. A repetition starts after the last sequence
breaker, and single tokens that are breakers are never penalized.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ridgeline.sample.logits import Floats, Ints
from ridgeline.spec.breakers import TokenBreaker
from ridgeline.spec.request import SamplingParams

MAX_PENALTY = float(np.finfo(np.float64).max / 4)  # so that differences of scores stay finite
_CATCH_UP = 8  # with more new tokens than this, matching from scratch is faster
_LEAST_ROOM = 256


def matches(tokens: Sequence[int]) -> list[int]:
    """Return for each index how many tokens before it equal the last tokens of the sequence.

    This is the Z-function of the reversed sequence: linear in its length (Gusfield 1997, section 1.4).
    """
    reverse = tokens[::-1]
    size = len(reverse)
    found = [0] * size
    left = right = 0  # reverse[left:right] equals a prefix, and reaches furthest
    for i in range(1, size):
        length = min(found[i - left], right - i) if i < right else 0
        while i + length < size and reverse[length] == reverse[i + length]:
            length += 1
        if i + length > right:
            left, right = i, i + length
        found[i] = length
    found[:1] = []  # the sequence itself
    return [0, *found[::-1]] if size else []


class BreakerCount:
    """Counts the tokens since the last sequence breaker. A push costs the same at any length."""

    def __init__(self, breakers: Sequence[TokenBreaker]) -> None:
        self.single: frozenset[int] = frozenset().union(*(one.heads for one in breakers if not one.tail))
        self._by_last: dict[int, list[TokenBreaker]] = {}
        for one in breakers:
            if one.tail:
                self._by_last.setdefault(one.tail[-1], []).append(one)
        self._longest = max((len(one.tail) for one in breakers), default=0)
        self._past: list[int] = []
        self.count = 0

    def push(self, token: int) -> None:
        """Take the next token of the sequence."""
        self.count += 1
        if self._longest:
            self._past = [*self._past[-self._longest :], token]
        if token in self.single or any(self._ends(one) for one in self._by_last.get(token, ())):
            self.count = 0

    def _ends(self, breaker: TokenBreaker) -> bool:
        """Return whether the sequence ends with this breaker."""
        size = len(breaker.tail)
        head = self._past[-size - 1] if len(self._past) > size else None
        return head in breaker.heads and tuple(self._past[-size:]) == breaker.tail


class Dry:
    """The DRY penalty of one sequence. A new token costs one pass over arrays of dry_penalty_last_n elements."""

    def __init__(self, params: SamplingParams, prompt: Sequence[int]) -> None:
        self._params = params
        self._window = params.dry_penalty_last_n
        self._breaks = BreakerCount(params.dry_token_breakers)
        self._new = list(prompt)  # tokens that are not in the arrays yet
        self._size = 0
        self._tokens: Ints = np.zeros(_LEAST_ROOM, np.int64)
        self._matches: Ints = np.zeros(_LEAST_ROOM, np.int64)  # as `matches`, of the tokens in the array

    def push(self, token: int) -> None:
        """Take the next token of the answer."""
        self._new.append(token)

    def apply(self, scores: Floats) -> None:
        """Subtract the penalty from scores [vocabulary] in place."""
        self._catch_up()
        params = self._params
        shortest = params.dry_allowed_length
        first = self._size - self._window if 0 <= self._window < self._size else 0
        if self._size - first <= shortest or self._breaks.count < shortest:
            return
        lengths = np.minimum(self._matches[first + 1 : self._size], self._breaks.count)
        if self._window >= 0:  # a match does not reach beyond the window
            lengths = np.minimum(lengths, np.arange(1, lengths.size + 1))
        repeated = np.flatnonzero(lengths >= shortest)
        if not repeated.size:
            return
        longest = np.zeros(scores.size, np.int64)
        np.maximum.at(longest, self._tokens[first + 1 : self._size][repeated], lengths[repeated])
        found = np.flatnonzero(longest)
        ids: Ints = np.array([token for token in found.tolist() if token not in self._breaks.single], np.int64)
        with np.errstate(over="ignore"):
            penalty = params.dry_multiplier * np.power(params.dry_base, longest[ids] - float(shortest))
        scores[ids] -= penalty.clip(max=MAX_PENALTY)

    def _catch_up(self) -> None:
        """Bring the arrays up to the last token."""
        new, self._new = self._new, []
        for token in new:
            self._breaks.push(token)
        self._make_room(len(new))
        if len(new) <= _CATCH_UP:
            for token in new:
                self._append(token)
        else:
            size = self._size + len(new)
            self._tokens[self._size : size] = new
            self._matches[:size] = matches(self._tokens[:size].tolist())
            self._size = size

    def _append(self, token: int) -> None:
        """Add one token: a match grows by one if the token that followed it is this one, else it ends."""
        size = self._size
        grown = np.where(self._tokens[:size] == token, self._matches[:size] + 1, 0)
        self._tokens[size] = token
        self._matches[1 : size + 1] = grown
        self._size = size + 1

    def _make_room(self, count: int) -> None:
        """Make room for `count` more tokens: drop those that left the window, or double the arrays."""
        if self._size + count <= self._tokens.size:
            return
        if 0 <= self._window <= self._size // 2:
            kept = slice(self._size - self._window, self._size)
            self._size = self._window
            for array in (self._tokens, self._matches):
                array[: self._size] = array[kept].copy()
            self._matches[:1] = 0
        if self._size + count > self._tokens.size:
            more = np.zeros(max(self._tokens.size, count), np.int64)
            self._tokens, self._matches = np.append(self._tokens, more), np.append(self._matches, more)
