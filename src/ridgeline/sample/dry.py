"""DRY ("don't repeat yourself"): penalize tokens that would continue a repetition, the more the longer it is.

The definition is that of text-generation-webui (oobabooga/text-generation-webui#5677) and llama.cpp. If the last L
tokens also occur earlier in the sequence, the token that followed them there loses

    dry_multiplier * dry_base ** (L - dry_allowed_length)

from its score, for the longest such L of at least dry_allowed_length. A repetition starts after the last sequence
breaker, and single tokens that are breakers are never penalized.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Reversible, Sequence
from dataclasses import dataclass, field

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


class BreakerTree:
    """The sequence breakers of a request, as a tree of their tails from the last token to the first.

    It does not change, so that all answers to a request share it.
    """

    def __init__(self, breakers: Sequence[TokenBreaker]) -> None:
        self.single: frozenset[int] = frozenset().union(*(one.heads for one in breakers if not one.tail))
        self.longest = max((len(one.tail) for one in breakers), default=0)
        self._root = _Node()
        for one in breakers if self.longest else ():
            node = self._root
            for token in reversed(one.tail):
                node = node.before.setdefault(token, _Node())
            if one.tail:
                node.heads |= one.heads

    def ends(self, past: Reversible[int]) -> bool:
        """Return whether some tokens end with a breaker. This costs a step for each token of the longest tail."""
        node: _Node | None = self._root
        for token in reversed(past):
            if node is None or token in node.heads:
                break
            node = node.before.get(token)
        else:
            return False
        return node is not None


@dataclass(slots=True)
class _Node:
    """A suffix of tails. heads: tokens that complete a breaker before it. before: longer suffixes, by their token."""

    heads: set[int] = field(default_factory=set)
    before: dict[int, _Node] = field(default_factory=dict)


class BreakerCount:
    """Counts the tokens since the last sequence breaker. A push costs the same at any length."""

    def __init__(self, tree: BreakerTree) -> None:
        self.tree = tree
        self._past = deque[int](maxlen=tree.longest + 1)
        self.count = 0

    def push(self, token: int) -> None:
        """Take the next token of the sequence."""
        self.count += 1
        if self.tree.longest:
            self._past.append(token)
        if token in self.tree.single or self.tree.ends(self._past):
            self.count = 0

    def copy(self) -> BreakerCount:
        """Return a count that continues from here."""
        count = BreakerCount(self.tree)
        count._past.extend(self._past)
        count.count = self.count
        return count


class Dry:
    """The DRY penalty of one sequence. A new token costs one pass over arrays of dry_penalty_last_n elements."""

    def __init__(self, params: SamplingParams, prompt: Sequence[int], origin: Dry | None = None) -> None:
        """origin: the penalty of another answer at the end of the same prompt."""
        self._params = params
        self._window = params.dry_penalty_last_n
        tree = BreakerTree(params.dry_token_breakers) if origin is None else origin._breaks.tree
        self._breaks: BreakerCount = BreakerCount(tree)
        self._origin = origin  # until its arrays are copied
        self._new = list(prompt)  # tokens that are not in the arrays yet
        self._size = 0
        self._tokens: Ints = np.zeros(_LEAST_ROOM, np.int64)
        self._matches: Ints = np.zeros(_LEAST_ROOM, np.int64)  # as `matches`, of the tokens in the array

    def start(self) -> Dry:
        """Return the penalty of an answer to the same prompt; to be called before the first push.

        The prompt is matched once, at the first `apply` of an answer.
        """
        return Dry(self._params, (), self)

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
        ids: Ints = np.array([token for token in found.tolist() if token not in self._breaks.tree.single], np.int64)
        with np.errstate(over="ignore"):
            penalty = params.dry_multiplier * np.power(params.dry_base, longest[ids] - float(shortest))
        scores[ids] -= penalty.clip(max=MAX_PENALTY)

    def _catch_up(self) -> None:
        """Bring the arrays up to the last token."""
        if (origin := self._origin) is not None:
            origin._catch_up()
            self._origin, self._breaks, self._size = None, origin._breaks.copy(), origin._size
            self._tokens, self._matches = origin._tokens.copy(), origin._matches.copy()
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
