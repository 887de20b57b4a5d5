"""Describe in a few lines what drafts gained: after `generate` and `bench`, in the chat, and in the server's log."""

from __future__ import annotations

import textwrap

from ridgeline.sched.stats import DraftCounts, DraftSpeed
from ridgeline.spec.acceptance import MEANING, Acceptance

WIDTH = 80  # columns


def draft_report(
    name: str, counts: DraftCounts, speed: DraftSpeed | None, acceptance: Acceptance, untreed: str | None = None
) -> list[str]:
    """Return lines of at most WIDTH columns; none if no draft was verified.

    name: name of the proposer. speed: None if the depth was fixed, because nothing then measures steps without drafts.
    untreed: why drafts were chains instead of trees; None if they were not.
    """
    if not counts.verifications:
        return []
    shares = ", ".join(f"{100 * share:.0f}" for share in counts.shares)
    reach = f"depths 1 to {len(counts.shares)}" if len(counts.shares) > 1 else "depth 1"
    proposer = "the given proposer" if name == "off" else name
    first = (
        f"drafts: {proposer}, {_depth(counts, speed)}; {counts.tokens:.2f} tokens a verification, "
        f"{1 + sum(counts.shares):.2f} expected from {shares} % reaching {reach}"
    )
    second = f"drafts: {'; '.join([*_times(speed), MEANING[acceptance]])}"
    texts = (first, second) if untreed is None else (first, second, f"drafts: chains instead of trees: {untreed}")
    return [line for text in texts for line in textwrap.wrap(text, WIDTH, subsequent_indent="  ")]


def _depth(counts: DraftCounts, speed: DraftSpeed | None) -> str:
    """Describe how many drafts a verification has on average, and from which batch on nothing is drafted."""
    mean, most = counts.run / counts.verifications, len(counts.tried_at)
    depth = f"depth {most}" if mean > most - 0.05 else f"depth {mean:.1f} on average, at most {most}"
    if counts.in_trees:
        depth = f"{mean:.1f} drafts on average, in trees of at most {most} levels"
    return depth if speed is None or speed.off_from is None else f"{depth} (0 from batch {speed.off_from} on)"


def _times(speed: DraftSpeed | None) -> list[str]:
    if speed is None or speed.factor is None:
        return []
    if not speed.verifying:
        return ["their gain is not known yet, because the first verifications are not measured"]
    predicted = "" if speed.expected_factor is None else f", {speed.expected_factor:.2f} predicted"
    verifying, drafting = speed.verifying / speed.seconds, speed.drafting / speed.seconds
    return [
        f"{speed.factor:.2f} times plain decode{predicted}",
        f"verification {verifying:.0%} of the time, drafting {drafting:.0%}",
    ]
