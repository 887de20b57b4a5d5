"""Propose what followed the last tokens of a sequence where they occurred before (prompt lookup, n-gram speculation).

A lookup compares the end of a sequence with its own earlier tokens, and with finished answers under its root, which
stands for a cache salt and a precision of state. The longest match decides which tokens are proposed, and how many.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import numpy as np

from ridgeline.propose.proposer import Wanted

Tokens = np.ndarray[Any, np.dtype[np.int32]]
LEAST_MATCH = 2  # tokens that must be equal; a single one repeats by chance
LONGEST_MATCH = 32  # a longer match says no more
SEARCHED_TOKENS = 1 << 15  # the last tokens of a sequence, in which its end is looked up
CANDIDATES = 256  # shortest matches that are compared further, the latest ones: a text of one token has them everywhere
KEPT_TOKENS = 1 << 16  # tokens of answers that are kept for each root
MAX_ROOTS = 64
BREAK = -1  # stands between two answers; no token


@dataclass(slots=True)
class History:
    """Tokens, to which more are appended. Holds at least the last `most` of them."""

    most: int = 1 << 62
    _room: Tokens = field(default_factory=lambda: np.empty(64, np.int32))
    _size: int = 0

    @property
    def tokens(self) -> Tokens:
        """Return a view of the tokens [n], valid until the next `append`."""
        return self._room[: self._size]

    def append(self, tokens: Sequence[int]) -> None:
        """Append tokens, and drop the first ones if there are twice as many as must be kept."""
        more = tokens[-self.most :]
        if self._size + len(more) > len(self._room):
            kept = self.tokens[max(0, self._size - self.most) :]
            self._room = np.empty(2 * (len(kept) + len(more)), np.int32)
            self._room[: len(kept)], self._size = kept, len(kept)
        self._room[self._size : self._size + len(more)] = more
        self._size += len(more)


@dataclass(slots=True)
class Lookup:
    """A sequence. root: names the answers that it may see. answer: number of tokens of its answer so far."""

    root: bytes
    answer: int
    history: History = field(default_factory=lambda: History(SEARCHED_TOKENS))


class NgramProposer:
    """A Proposer that looks up the last tokens of a sequence in its history and in finished answers."""

    def __init__(self) -> None:
        self._open: dict[int, Lookup] = {}  # by sequence
        self._finished: OrderedDict[bytes, History] = OrderedDict()  # by root, the most recently used last

    def propose(self, wanted: Sequence[Wanted]) -> Mapping[int, Sequence[int]]:
        found = {}
        for w in wanted:
            one = self._open.get(w.sequence)
            if one is None:
                one = self._open[w.sequence] = Lookup(w.root, len(w.tokens) - w.prompt)
                one.history.append(w.tokens)
            if drafts := self._drafts(one, w.most):
                found[w.sequence] = drafts
        return found

    def _drafts(self, one: Lookup, most: int) -> list[int]:
        """Return the tokens after the longest match; of equally long ones, after that in the sequence itself."""
        own = one.history.tokens
        length, at = longest_match(own[:-1], own)
        drafts = repeated(own[at:], min(length, most)) if length else []
        finished = self._finished.get(one.root)
        if finished is not None and length < LONGEST_MATCH:
            other, at = longest_match(finished.tokens, own)
            if other > length:
                drafts = finished.tokens[at : at + min(other, most)].tolist()
        return drafts[: drafts.index(BREAK)] if BREAK in drafts else drafts

    def commit(self, sequence: int, tokens: Sequence[int]) -> None:
        if (one := self._open.get(sequence)) is not None:
            one.history.append(tokens)
            one.answer += len(tokens)

    def fork(self, parent: int, child: int) -> None:
        """Do nothing: the child is looked up like a new sequence when it wants drafts."""

    def preempt(self, sequence: int) -> None:
        """Do nothing: the tokens of the sequence stay the same."""

    def end(self, sequence: int) -> None:
        one = self._open.pop(sequence, None)
        if one is None or not one.answer:
            return
        kept = self._finished.setdefault(one.root, History(KEPT_TOKENS))
        self._finished.move_to_end(one.root)
        kept.append([*one.history.tokens[-one.answer :].tolist(), BREAK])
        if len(self._finished) > MAX_ROOTS:
            self._finished.popitem(last=False)

    def reset(self) -> None:
        self._open.clear()


if find_spec("ridgeline._kernels") is not None:
    from ridgeline._kernels import longest_match as _longest_match

    def longest_match(text: Tokens, last: Tokens) -> tuple[int, int]:
        """Return what `compared` returns, by a kernel."""
        return _longest_match(text, last, LEAST_MATCH, LONGEST_MATCH, CANDIDATES)

else:

    def longest_match(text: Tokens, last: Tokens) -> tuple[int, int]:
        """Return what `compared` returns."""
        return compared(text, last)


def compared(text: Tokens, last: Tokens) -> tuple[int, int]:
    """Return the length of the longest match, and the index behind it; (0, 0) if the match is too short.

    A match is a part of `text` that equals the last tokens of `last`; of equally long ones, the latest counts. Only the
    latest CANDIDATES matches of LEAST_MATCH tokens are compared further.
    """
    size = min(LONGEST_MATCH, len(last))
    if size < LEAST_MATCH:
        return 0, 0
    ends = np.flatnonzero(text == last[-1])  # where the last token stands
    for back in range(1, LEAST_MATCH):
        ends = ends[ends >= back]
        ends = ends[text[ends - back] == last[-1 - back]]
    if not ends.size:
        return 0, 0
    ends = ends[-CANDIDATES:]
    at = ends[:, None] - np.arange(size)
    equal = (text[np.maximum(at, 0)] == last[: -1 - size : -1]) & (at >= 0)
    lengths = np.where(equal.all(axis=1), size, equal.argmin(axis=1))
    best = len(ends) - 1 - int(lengths[::-1].argmax())
    return int(lengths[best]), int(ends[best]) + 1


def repeated(tokens: Tokens, count: int) -> list[int]:
    """Return `count` tokens: those given, and from the first one on again if they are fewer."""
    found: list[int] = tokens[:count].tolist()
    return found if len(found) == count else (found * -(-count // len(found)))[:count]
