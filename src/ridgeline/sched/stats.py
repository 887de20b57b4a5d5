"""Counts of the scheduler, for reports and metrics."""

from __future__ import annotations

from dataclasses import dataclass

from ridgeline.sched.page_times import PageTimes

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


@dataclass(frozen=True, slots=True)
class Stats:
    """The state of the scheduler now, and its counters since the start.

    queried_tokens: tokens of sequences when they were first admitted. hit_tokens: queried tokens found in the prefix
    index. snapshots: recurrent states in the prefix index now. restored: requests that began from one.
    recomputed_tokens: tokens that an earlier prompt shared, but after the nearest snapshot. draft_tokens: drafts that
    were run. accepted_tokens: drafts that were accepted. unrecorded: why decode steps are not run from a recording;
    None if they are. unproposed: why the proposer of drafts is not used any more; None if it is, or if there is none.
    last_step: the sequences of the last step that computed. page_times: histograms that are still filled; None if they
    are not measured.
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
    draft_tokens: int
    accepted_tokens: int
    unrecorded: str | None = None
    unproposed: str | None = None
    last_step: StepShape = ()
    page_times: PageTimes | None = None

    @property
    def hit_rate(self) -> float:
        """Share of queried tokens that were found in the prefix index, 0 to 1."""
        return self.hit_tokens / self.queried_tokens if self.queried_tokens else 0.0
