"""The interface of everything that proposes draft tokens: an n-gram table, a draft model, extra heads, a test."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from ridgeline.sample.rejection import Distribution
from ridgeline.sched.watcher import Watcher
from ridgeline.spec.trees import first_chain


class Wanted(NamedTuple):
    """A sequence that can verify drafts in the next step.

    tokens: its prompt and answer so far, read-only; they change with the next commit. most: the number of drafts that
    the step can take. root: sequences with other roots must not see its tokens, as with other cache salts. prompt:
    number of tokens of its prompt.
    """

    sequence: int
    tokens: Sequence[int]
    most: int
    root: bytes = b""
    prompt: int = 0


@dataclass(frozen=True, slots=True)
class Drafts:
    """Draft tokens, as a chain or a tree, and the distributions that they were drawn from.

    parents: in a tree, the index of the draft that each one follows, which comes before it; -1: it follows the last
    token of the sequence. A tree has at most 63 drafts. (): a chain, in which each draft follows the one before it.
    q: one for each token, after the parameters of the request; None: the tokens were chosen in another way, or some
    were dropped because of what they are (sample/rejection.py). `--draft-acceptance rejection` needs them.
    """

    tokens: Sequence[int]
    q: Sequence[Distribution] | None = None
    parents: Sequence[int] = ()

    def chain(self) -> Drafts:
        """Return the chain of first children."""
        kept = first_chain(self.parents)
        return Drafts([self.tokens[i] for i in kept], None if self.q is None else [self.q[i] for i in kept])


class Proposer(Watcher, Protocol):
    """Proposes tokens that may follow those of sequences; the model verifies them, so answers stay as they are.

    It is told of every commit, fork, preemption and end of the scheduler's sequences (sched/watcher.py), and is called
    once before each step for all sequences. Calls come from one thread, and the step waits for them. If it raises, or
    proposes what is no token, the engine stops using it and continues without drafts.
    """

    def propose(self, wanted: Sequence[Wanted]) -> Mapping[int, Sequence[int] | Drafts]:
        """Return drafts by sequence id. Sequences may be left out; drafts beyond `most` are cut off."""
        ...

    def reset(self) -> None:
        """Forget all sequences: the engine lost them with a step that failed. Their ids are not used again."""
        ...
