"""Counts of the scheduler, for reports and metrics."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from ridgeline.sched.page_times import PageTimes
from ridgeline.spec.acceptance import Acceptance

# For each sequence in a step: its new tokens, its context including them, and its rows of logits.
StepShape = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True)
class GroupStats:
    """Statistics of the pages of one state group.

    used_pages: pages that sequences hold; a shared page counts once. peak_pages: the highest used_pages so far. slots:
    tokens that fit into the pages of running sequences. wasted_slots: slots without a token that is still read. The
    slots of a shared page count once per holder; a snapshot has none. shared_pages: references of sequences to pages
    beyond the first to each.
    """

    name: str
    num_pages: int
    used_pages: int
    peak_pages: int
    host_pages_used: int
    slots: int
    wasted_slots: int
    shared_pages: int


@dataclass(slots=True)
class DraftCounts:
    """Counts of verified drafts.

    verifications: runs of a sequence with drafts. run: drafts that were run. accepted: drafts that were accepted.
    accepted_at: the accepted drafts by position, the first one first.
    """

    verifications: int = 0
    run: int = 0
    accepted: int = 0
    accepted_at: list[int] = field(default_factory=list)

    def add(self, run: int, accepted: int) -> None:
        """Count a verification."""
        self.verifications += 1
        self.run += run
        self.accepted += accepted
        self.accepted_at += [0] * (run - len(self.accepted_at))
        for position in range(accepted):
            self.accepted_at[position] += 1

    def copy(self) -> DraftCounts:
        """Return the counts so far."""
        return replace(self, accepted_at=list(self.accepted_at))


@dataclass(frozen=True, slots=True)
class Stats:
    """The state of the scheduler now, and its counters since the start.

    queried_tokens: tokens of sequences when they were first admitted. hit_tokens: queried tokens found in the prefix
    index. snapshots: recurrent states in the prefix index now. restored: requests that began from one.
    recomputed_tokens: tokens that an earlier prompt shared, but after the nearest snapshot. drafts: counts of drafts.
    unrecorded: why decode steps are not run from a recording; None if they are. unproposed: why the proposer of drafts
    is not used any more; None if it is, or if there is none. last_step: the sequences of the last step that computed.
    draft_acceptance: how drafts are accepted; "typical" is lossy. page_times: histograms that are still filled; None if
    they are not measured.
    """

    running: int
    waiting: int
    groups: tuple[GroupStats, ...]
    queried_tokens: int
    hit_tokens: int
    preempted_recompute: int
    preempted_swap: int
    snapshots: int
    restored: int
    recomputed_tokens: int
    drafts: DraftCounts
    unrecorded: str | None = None
    unproposed: str | None = None
    last_step: StepShape = ()
    draft_acceptance: Acceptance = "same"
    page_times: PageTimes | None = None

    @property
    def draft_tokens(self) -> int:
        """Number of drafts that were run."""
        return self.drafts.run

    @property
    def accepted_tokens(self) -> int:
        """Number of drafts that were accepted."""
        return self.drafts.accepted

    @property
    def hit_rate(self) -> float:
        """Share of queried tokens that were found in the prefix index, 0 to 1."""
        return self.hit_tokens / self.queried_tokens if self.queried_tokens else 0.0
