"""Counts of the scheduler, for reports and metrics."""

from __future__ import annotations

from dataclasses import dataclass

from ridgeline.sched.page_times import PageTimes

# Of each sequence in a step: its new tokens, its context with them, and its rows of logits.
StepShape = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True)
class GroupStats:
    """Pages of one group.

    used_pages: held by sequences, each counted once; peak_pages: the most so far. slots: token places in pages that
    running sequences hold. wasted_slots: those without a token that is still read. A shared page's slots count once
    per holder; a snapshot has none. shared_pages: references of sequences to pages, beyond one to each.
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
    """The scheduler at one moment, and its counters since the start.

    queried_tokens, hit_tokens: known at first admission, and of those found in the prefix index. Of recurrent layers:
    snapshots: states in the prefix index now; restored: requests that went on from one; recomputed_tokens: those that
    an earlier prompt began with too, but past the nearest snapshot. draft_tokens, accepted_tokens: that were run, and
    of those. unrecorded: why decode steps are not run from a recording, None where they are. unproposed: why the
    proposer of drafts is not used any more, None where it is, or there is none.
    last_step: what the last step that computed was made of. page_times: still counting; None where nobody counts them.
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
        """Share of known tokens that were not computed again, 0 to 1."""
        return self.hit_tokens / self.queried_tokens if self.queried_tokens else 0.0
