"""Drafts in the engine: who proposes them, and for which sequences."""

from __future__ import annotations

from collections.abc import Container, Mapping
from collections.abc import Sequence as Seq

from ridgeline.errors import RequestError
from ridgeline.propose import Drafts, GivenDrafts, Guard, Proposer, Wanted
from ridgeline.sample.rejection import Distribution
from ridgeline.sched.scheduler import Scheduler
from ridgeline.sched.watcher import Watcher
from ridgeline.sched.work import Work


class Drafting:
    """Calls the proposer of an engine once a step. most: draft tokens of a sequence in a step; 0: nobody proposes.

    Without a proposer of its own the engine uses the drafts that are given by `give`.
    """

    def __init__(self, most: int, vocab_size: int, proposer: Proposer | None) -> None:
        self._most = most
        self._given = GivenDrafts() if proposer is None else None
        chosen = proposer or self._given
        self._guard = Guard(chosen, vocab_size) if most and chosen is not None else None
        self._proposed: Mapping[int, Drafts] = {}  # for the next step, by sequence

    def reset(self) -> None:
        """Forget all sequences and their drafts, and the failure of a proposer."""
        if self._guard is not None:
            self._guard.reset()

    @property
    def is_on(self) -> bool:
        """Return whether drafts may be proposed in the next step."""
        return self._guard is not None and self._guard.refusal is None

    @property
    def refusal(self) -> str | None:
        """Return why the proposer is not used any more; None while it is, or if there is none."""
        return None if self._guard is None else self._guard.refusal

    @property
    def watcher(self) -> Watcher | None:
        """Return what is told of commits, forks, preemptions and ends."""
        return self._guard

    @property
    def lookahead(self) -> int:
        """Return for how many tokens after those of a step pages are taken: a proposer needs none."""
        return 0

    def give(self, sequence: int, drafts: Seq[int] | Drafts) -> None:
        """Set a sequence's drafts for its next step. Raises RequestError if a proposer has this task."""
        if self._given is None:
            raise RequestError("this engine has a proposer; drafts cannot be given as well")
        if self._guard is not None:
            self._given.give(sequence, drafts)

    def propose(self, scheduler: Scheduler, sequences: Container[int]) -> None:
        """Let the proposer propose for the next step. sequences: ids that may have drafts; beams have none."""
        self._proposed = {}
        if self._guard is None or self._guard.refusal is not None:
            return
        wanted = []
        for seq in scheduler.can_verify():
            most = min(self._most, seq.bound - len(seq.tokens) - 1)
            if most > 0 and seq.id in sequences:
                wanted.append(Wanted(seq.id, seq.tokens, most, seq.root, seq.num_prompt))
        self._proposed = self._guard.propose(wanted) if wanted else {}
        for sequence, drafts in self._proposed.items():
            scheduler.propose(sequence, drafts.tokens)

    def distributions(self, work: Work) -> Seq[Distribution] | None:
        """Return the distributions that a work's drafts were drawn from; None: they are point masses.

        Drafts that the scheduler kept from an earlier step have none any more: as point masses they are exact too.
        """
        found = self._proposed.get(work.sequence)
        return None if found is None or found.q is None else found.q[: work.num_draft]
