"""Drafts in the engine: who proposes them, for which sequences, and how many."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Container, Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace

from ridgeline.engine.answers import Answer
from ridgeline.engine.depth import DepthRule
from ridgeline.errors import RequestError
from ridgeline.propose import Drafts, GivenDrafts, Guard, Proposer, Wanted
from ridgeline.sample.rejection import Distribution
from ridgeline.sched.scheduler import Scheduler
from ridgeline.sched.sequence import Sequence
from ridgeline.sched.stats import DraftSpeed
from ridgeline.sched.watcher import NO_WATCHER, Watcher
from ridgeline.sched.work import Result, StepPlan, Work

Found = Mapping[int, Drafts]  # by sequence


class Drafting(ABC):
    """Gets drafts for an engine once a step.

    most: draft tokens of a sequence in a step. rule: chooses how many; None: as many as possible.
    """

    lookahead = 0  # for so many tokens after those of a step, pages are taken

    def __init__(self, most: int, rule: DepthRule | None) -> None:
        self._most, self._rule = most, rule
        self._proposed: Found = {}  # for the next step
        self._rounds, self._began, self._drafting = 0, 0.0, 0.0
        self._rests = False  # the next step was not chosen for, and is not measured
        self.chains_because: str | None = None  # why trees cannot be verified; None if they can
        self.untreed: str | None = None  # the same, once a tree was cut to a chain

    @property
    @abstractmethod
    def is_on(self) -> bool:
        """Return whether drafts may be proposed in the next step."""

    @property
    def is_alone(self) -> bool:
        """Return whether the step that was submitted last must end before the next one is scheduled."""
        return self.is_on and not (self._rests and self._rule is not None and self._rule.is_resting)

    @property
    @abstractmethod
    def refusal(self) -> str | None:
        """Return why nothing proposes any more; None while something does, or if nothing ever did."""

    @property
    def watcher(self) -> Watcher:
        """Return what is told of commits, forks, preemptions and ends."""
        return NO_WATCHER

    @property
    def speed(self) -> DraftSpeed | None:
        """Return what drafts gained so far; None if nothing chooses how many there are."""
        return None if self._rule is None else replace(self._rule.speed.copy(), off_from=self._rule.off_from())

    @abstractmethod
    def reset(self) -> None:
        """Forget all sequences, and the failure of what proposes."""

    @abstractmethod
    def give(self, sequence: int, drafts: Seq[int] | Drafts) -> None:
        """Set a sequence's drafts for its next step. Raises RequestError if something else proposes them."""

    @abstractmethod
    def _room(self, seq: Sequence) -> int:
        """Return how many drafts a sequence can have in the next step."""

    @abstractmethod
    def _find(
        self, depths: Mapping[int, int], sequences: Mapping[int, Sequence], answers: Mapping[int, Answer]
    ) -> Found:
        """Return drafts for the next step. depths: how many each sequence can have, at least 1."""

    def propose(self, scheduler: Scheduler, answers: Mapping[int, Answer]) -> None:
        """Get drafts for the next step. answers: by sequence; beams have none, and get no drafts."""
        self._proposed, self._rests = {}, self._rule is not None and self._rule.is_resting
        if self._rests and self._rule is not None:
            self._rule.rest()
            return
        self._rounds, began = 0, time.perf_counter()
        if self.is_on:
            able = scheduler.can_verify()
            room = {seq.id: min(self._limit(answers[seq.id]), self._room(seq)) for seq in able if seq.id in answers}
            room = {sequence: most for sequence, most in room.items() if most > 0}
            depths = room
            if self._rule is not None:
                chosen = self._rule.depths(list(room), len(able))
                depths = {sequence: min(depth, room[sequence]) for sequence, depth in chosen.items()}
            if depths or self._rule is None:
                self._proposed = self._verifiable(self._find(depths, {seq.id: seq for seq in able}, answers))
            for sequence, drafts in self._proposed.items():
                scheduler.propose(sequence, drafts.tokens, drafts.parents)
        self._began = time.perf_counter()
        self._drafting = self._began - began

    def _verifiable(self, found: Found) -> Found:
        """Return drafts that the model can verify: chains in place of trees if it has recurrent layers."""
        if self.chains_because is None or not any(drafts.parents for drafts in found.values()):
            return found
        self.untreed = self.chains_because
        return {sequence: drafts.chain() if drafts.parents else drafts for sequence, drafts in found.items()}

    def _limit(self, answer: Answer) -> int:
        """Return how many drafts the settings and the request of an answer allow in a step."""
        own = answer.row.params.num_speculative_tokens
        return self._most if own is None else min(own, self._most)

    def distributions(self, work: Work) -> Seq[Distribution] | None:
        """Return the distributions that a work's drafts were drawn from; None: they are point masses.

        Drafts that the scheduler kept from an earlier step have none any more: as point masses they are exact too.
        """
        found = self._proposed.get(work.sequence)
        return None if found is None or found.q is None else found.q[: work.num_draft]

    def collected(self, plan: StepPlan, results: Seq[Result]) -> None:
        """Take note of a step that ran after the last `propose`."""
        works, rule = plan.works, self._rule
        if rule is None or self._rests or not works:
            return
        decodes = all(work.sample and len(work.tokens) == work.num_draft + 1 for work in works)
        if decodes:
            seconds, drafts = time.perf_counter() - self._began, sum(work.num_draft for work in works)
            tokens = sum(len(result.tokens) for result in results)
            rule.step(len(works), drafts, self._rounds, seconds, self._drafting, tokens)
        for work, result in zip(works, results, strict=True):
            if decodes or work.num_draft:
                chain = range(len(result.tokens) - 1)
                if rule.is_tree:
                    rule.verified(work.sequence, work.num_draft, result.path if work.parents else chain)
                else:
                    rule.verified(work.sequence, work.depth, chain)

    def end(self, sequence: int) -> None:
        """Forget a sequence that is over."""
        if self._rule is not None:
            self._rule.end(sequence)


class ProposerDrafting(Drafting):
    """Calls a proposer; without one, it takes the drafts that are given by `give`. most: 0 for no drafts."""

    def __init__(self, most: int, vocab_size: int, proposer: Proposer | None, rule: DepthRule | None = None) -> None:
        super().__init__(most, rule)
        self._given = GivenDrafts() if proposer is None else None
        chosen = proposer or self._given
        self._guard = Guard(chosen, vocab_size) if most and chosen is not None else None

    def reset(self) -> None:
        if self._guard is not None:
            self._guard.reset()

    @property
    def is_on(self) -> bool:
        return self._guard is not None and self._guard.refusal is None

    @property
    def refusal(self) -> str | None:
        return None if self._guard is None else self._guard.refusal

    @property
    def watcher(self) -> Watcher:
        return self._guard or NO_WATCHER

    def give(self, sequence: int, drafts: Seq[int] | Drafts) -> None:
        if self._given is None:
            raise RequestError("this engine has a proposer; drafts cannot be given as well")
        if self._guard is not None:
            self._given.give(sequence, drafts)

    def _room(self, seq: Sequence) -> int:
        return seq.bound - len(seq.tokens) - 1

    def _find(self, depths: Mapping[int, int], sequences: Mapping[int, Sequence], answers: Container[int]) -> Found:
        wanted = []
        for sequence, depth in depths.items():
            seq = sequences[sequence]
            wanted.append(Wanted(sequence, seq.tokens, depth, seq.root, seq.num_prompt))
        return self._guard.propose(wanted) if wanted and self._guard is not None else {}
