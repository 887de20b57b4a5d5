"""The interface of an observer of a scheduler: a proposer of drafts, or a test."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Protocol


class Watcher(Protocol):
    """Is told of every commit, fork, preemption and end, in the order in which they happen.

    Sequences are named by their ids. Methods are called in the middle of scheduling: they must not raise, and must not
    call the scheduler.
    """

    def commit(self, sequence: int, tokens: Seq[int]) -> None:
        """Note that `tokens` were added to the sequence; never empty."""
        ...

    def fork(self, parent: int, child: int) -> None:
        """Note that `child` begins to run on the tokens that `parent` has computed: a choice of n > 1, or a beam."""
        ...

    def preempt(self, sequence: int) -> None:
        """Note that the sequence lost its row and its pages; it continues later with the same tokens."""
        ...

    def end(self, sequence: int) -> None:
        """Note that the sequence is over: finished, stopped or aborted. Nothing more is told of it."""
        ...


class NullWatcher:
    """A Watcher that does nothing."""

    def commit(self, sequence: int, tokens: Seq[int]) -> None:
        """Do nothing."""

    def fork(self, parent: int, child: int) -> None:
        """Do nothing."""

    def preempt(self, sequence: int) -> None:
        """Do nothing."""

    def end(self, sequence: int) -> None:
        """Do nothing."""


NO_WATCHER = NullWatcher()
