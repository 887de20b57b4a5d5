"""Measure a draft on held-out continuations that the target wrote greedily, in dense passes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ridgeline.errors import DataError
from ridgeline.evals import Acceptance
from ridgeline.train.drafts.batch import Batch, Target
from ridgeline.train.drafts.continuations import Continuation
from ridgeline.train.drafts.learners import Bools, Learner, MedusaLearner

TOKENS = 4096  # tokens of a pass
RANKS = 10  # best tokens of a Medusa head that are counted


@dataclass(frozen=True, slots=True)
class DraftQuality:
    """How often drafts are right.

    Args:
        shares: For each depth k, the share of held-out positions at which the first k drafts are right.
        num_positions: Number of these positions.
        acceptance: Verifications in turn over the continuations.
        accuracies: For each head of a Medusa model, the share of positions at which its token of each rank is right,
            whatever comes before it; () for other drafts. Trees are made from them (runtime/medusa_tree.py).
    """

    shares: tuple[float, ...]
    num_positions: int
    acceptance: Acceptance
    accuracies: tuple[tuple[float, ...], ...] = ()

    def lines(self) -> list[str]:
        """Return the report in two lines."""
        found, depth = self.acceptance.tokens_per_verification, self.acceptance.num_draft_tokens
        error = "" if found.standard_error is None else f" +- {found.standard_error:.2f}"
        shares = ", ".join(f"{100 * share:.1f}" for share in self.shares)
        return [
            f"held out: {shares} % of {self.num_positions:,} positions have the first "
            f"{', '.join(map(str, range(1, depth + 1)))} drafts right",
            f"{found.value:.2f}{error} tokens a verification with {depth} drafts, greedy, over "
            f"{self.acceptance.num_tokens:,} tokens of {self.acceptance.num_sequences:,} continuations",
        ]


def measure_draft(
    learner: Learner, target: Target, held_out: Sequence[Continuation], depth: int,
    on_tokens: Callable[[int], None] = lambda tokens: None,
) -> DraftQuality:  # fmt: skip
    """Return how often chains of `depth` drafts equal the continuations.

    A draft counts at a depth only after right ones, so each chain may read the continuation itself. Verifications are
    counted as in `ridgeline.evals.measure_acceptance`. Raises DataError if no continuation is long enough.
    """
    usable = [one for one in held_out if len(one.ids) - one.prompt > depth + 1]
    if not usable:
        raise DataError(
            f"no held-out continuation has more than {depth + 1} tokens, so {depth} drafts cannot be measured; give "
            "other texts, or a smaller --depth"
        )
    rights: list[Bools] = []
    by_rank: list[list[Bools]] = []
    for some in _passes(usable):
        batch = Batch(some, target.table)
        rights += _by_sequence(batch, learner.hits(batch, depth), depth)
        if isinstance(learner, MedusaLearner):
            by_rank.append(learner.rank_hits(batch, min(RANKS, target.num_draft_tokens)))
        on_tokens(sum(batch.lengths))
    accepted = [np.cumprod(right, 1).sum(1) for right in rights]  # drafts before the first wrong one, by position
    everywhere = np.concatenate(accepted)
    shares = tuple(float((everywhere >= k).mean()) for k in range(1, depth + 1))
    replayed = [_replay(counts.tolist()) for counts in accepted]
    means = tuple(tuple(np.concatenate(found).mean(0).tolist()) for found in zip(*by_rank, strict=True))
    return DraftQuality(shares, len(everywhere), Acceptance.of(replayed, depth), means)


def _replay(accepted: Sequence[int]) -> list[int]:
    """Return the accepted drafts of each verification. accepted: by position; only positions with all drafts count."""
    found, at = [], 0
    while at < len(accepted):
        found.append(int(accepted[at]))
        at += found[-1] + 1
    return found


def _passes(some: Sequence[Continuation]) -> list[list[Continuation]]:
    parts: list[list[Continuation]] = [[]]
    for one in some:
        if parts[-1] and sum(len(other.ids) for other in parts[-1]) + len(one.ids) > TOKENS:
            parts.append([])
        parts[-1].append(one)
    return parts


def _by_sequence(batch: Batch, found: Sequence[Bools], depth: int) -> list[Bools]:
    """Return [positions, depth] for each sequence, where all `depth` drafts of a position can be judged."""
    cut = []
    for k, right in enumerate(found):
        counts = [n - 1 - p - k for n, p in zip(batch.lengths, batch.prompts, strict=True)]
        cut.append(np.split(right, np.cumsum(counts)[:-1]))
    most = [n - p - depth for n, p in zip(batch.lengths, batch.prompts, strict=True)]
    return [np.stack([part[i][:count] for part in cut], 1) for i, count in enumerate(most)]
