"""Drafts that a caller gives (`Engine.propose`), as a proposer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ridgeline.propose.proposer import Drafts, Wanted


class GivenDrafts:
    """A Proposer of what was given for the next step of each sequence."""

    def __init__(self) -> None:
        self._given: dict[int, Drafts] = {}  # by sequence

    def give(self, sequence: int, drafts: Sequence[int] | Drafts) -> None:
        """Set the tokens that may follow those of a sequence so far; they replace what was given before."""
        self._given[sequence] = drafts if isinstance(drafts, Drafts) else Drafts(tuple(drafts))

    def propose(self, wanted: Sequence[Wanted]) -> Mapping[int, Drafts]:
        given = self._given
        return {w.sequence: given.pop(w.sequence) for w in wanted if w.sequence in given} if given else {}

    def commit(self, sequence: int, tokens: Sequence[int]) -> None:
        self._given.pop(sequence, None)  # they were to follow the tokens before these

    def fork(self, parent: int, child: int) -> None:
        """Keep what was given: a fork's drafts are given by its own id."""

    def preempt(self, sequence: int) -> None:
        """Keep what was given: the tokens of the sequence stay the same."""

    def end(self, sequence: int) -> None:
        self._given.pop(sequence, None)

    def reset(self) -> None:
        self._given.clear()
