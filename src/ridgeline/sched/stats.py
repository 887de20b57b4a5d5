"""Counts of the scheduler, for reports and metrics."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import accumulate, zip_longest
from operator import mul

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
    beyond the first to each. kept_pages: free pages that stay in the prefix index while others were never used.
    """

    name: str
    num_pages: int
    used_pages: int
    peak_pages: int
    host_pages_used: int
    slots: int
    wasted_slots: int
    shared_pages: int
    kept_pages: int = 0


@dataclass(slots=True)
class DraftCounts:
    """Counts of verified drafts.

    verifications: runs of a sequence with drafts. run: drafts that were run. accepted: drafts that were accepted.
    accepted_at: the accepted drafts by position, the first one first. tried_at: drafts at each position whose
    predecessors were all accepted. Positions in a tree are those of its accepted path, and each verification whose tree
    is deep enough counts. in_trees: verifications whose drafts formed a tree.
    """

    verifications: int = 0
    run: int = 0
    accepted: int = 0
    accepted_at: list[int] = field(default_factory=list)
    tried_at: list[int] = field(default_factory=list)
    in_trees: int = 0

    def add(self, run: int, accepted: int, depth: int) -> None:
        """Count a verification. depth: most drafts that it could accept."""
        self.verifications += 1
        self.run += run
        self.accepted += accepted
        self.in_trees += run > depth
        self.accepted_at += [0] * (depth - len(self.accepted_at))
        self.tried_at += [0] * (depth - len(self.tried_at))
        for position in range(accepted):
            self.accepted_at[position] += 1
        for position in range(min(depth, accepted + 1)):
            self.tried_at[position] += 1

    def copy(self) -> DraftCounts:
        """Return the counts so far."""
        return replace(self, accepted_at=list(self.accepted_at), tried_at=list(self.tried_at))

    def plus(self, other: DraftCounts, times: int = 1) -> DraftCounts:
        """Return the sum of two counts, or their difference with times = -1."""
        return DraftCounts(
            self.verifications + times * other.verifications, self.run + times * other.run,
            self.accepted + times * other.accepted, _sum(self.accepted_at, other.accepted_at, times),
            _sum(self.tried_at, other.tried_at, times), self.in_trees + times * other.in_trees,
        )  # fmt: skip

    @property
    def tokens(self) -> float:
        """Return the mean tokens of a verification: the accepted drafts and one more."""
        return 1 + self.accepted / self.verifications if self.verifications else 1.0

    @property
    def acceptance(self) -> tuple[float, ...]:
        """Return the share of the drafts at each position that were accepted, of those whose predecessors all were."""
        return tuple(a / n if n else 0.0 for a, n in zip(self.accepted_at, self.tried_at, strict=True))

    @property
    def shares(self) -> tuple[float, ...]:
        """Return the expected share of verifications that reach each depth, if all had the most drafts."""
        return tuple(accumulate(self.acceptance, mul))


def _sum(one: list[int], other: list[int], times: int) -> list[int]:
    return [a + times * b for a, b in zip_longest(one, other, fillvalue=0)]


@dataclass(slots=True)
class DraftSpeed:
    """Measures what drafts gain, over the steps that only decode.

    seconds: duration of these steps and of making their drafts. drafting: the part of it in which drafts were made.
    verifying: the part of it in steps that verified drafts. off_from: the smallest batch so far from which on no draft
    pays; None if there was none.
    plain: seconds that their tokens would have taken without drafts. expected: seconds that the steps were expected to
    take when their depths were chosen. expected_plain: seconds that the tokens expected from them would have taken
    without drafts. depths: number of times that each depth was chosen for a sequence.
    """

    seconds: float = 0.0
    drafting: float = 0.0
    verifying: float = 0.0
    plain: float = 0.0
    expected: float = 0.0
    expected_plain: float = 0.0
    depths: list[int] = field(default_factory=list)
    off_from: int | None = None

    @property
    def factor(self) -> float | None:
        """Return the speed over the speed without drafts; None before the first step."""
        return self.plain / self.seconds if self.seconds else None

    @property
    def expected_factor(self) -> float | None:
        """Return the expected speed over the speed without drafts; None before the first step."""
        return self.expected_plain / self.expected if self.expected else None

    def copy(self) -> DraftSpeed:
        """Return the measurements so far."""
        return replace(self, depths=list(self.depths))


@dataclass(frozen=True, slots=True)
class Stats:
    """The state of the scheduler now, and its counters since the start.

    queried_tokens: tokens of sequences when they were first admitted. hit_tokens: queried tokens found in the prefix
    index. snapshots: recurrent states in the prefix index now. restored: requests that began from one.
    recomputed_tokens: tokens that an earlier prompt shared, but after the nearest snapshot. drafts: counts of drafts.
    unrecorded: why decode steps are not run from a recording; None if they are. unproposed: why the proposer of drafts
    is not used any more; None if it is, or if there is none. untreed: why trees of drafts are cut to chains; None if
    they are not, or if there was none. shrunk: why steps have fewer tokens than planned; empty if they do not.
    resident_pages: pages of each group that have memory, since they were used or
    touched; () in the simulator. last_step: the sequences of the last step that computed. proposer: name of what
    proposes drafts. draft_acceptance: how drafts are accepted; "typical" is lossy. draft_speed: times with drafts and
    without; None if there are none, or if their depth is fixed. page_times: histograms that are still filled; None if
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
    untreed: str | None = None
    shrunk: str = ""
    resident_pages: tuple[int, ...] = ()
    last_step: StepShape = ()
    proposer: str = "off"
    draft_acceptance: Acceptance = "same"
    draft_speed: DraftSpeed | None = None
    page_times: PageTimes | None = None

    @property
    def draft_tokens(self) -> int:
        """Return the number of drafts that were run."""
        return self.drafts.run

    @property
    def accepted_tokens(self) -> int:
        """Return the number of drafts that were accepted."""
        return self.drafts.accepted

    @property
    def hit_rate(self) -> float:
        """Return the share of queried tokens that were found in the prefix index, 0 to 1."""
        return self.hit_tokens / self.queried_tokens if self.queried_tokens else 0.0
