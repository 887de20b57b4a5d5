"""Token editing: a token of the open block is replaced if a later pass prefers another one (LLaDA2.1, 2602.08676)."""

from __future__ import annotations

from collections.abc import Sequence

MAX_EDIT_PASSES = 16  # passes over a block without masks: tokens that contradict each other may change in turn forever


def replaced(known: Sequence[int], found: Sequence[int], probabilities: Sequence[float], threshold: float) -> list[int]:
    """Return the indices of known tokens for which another one was found with a probability above `threshold`.

    found, probabilities: the token that a pass predicts for each known one, and its probability.
    """
    each = enumerate(zip(known, found, probabilities, strict=True))
    return [i for i, (token, other, chance) in each if other != token and chance > threshold]


def is_settled(had_masks: bool, changed: bool, passes: int) -> bool:
    """Return whether a block is done after a pass. passes: passes over the block without masks, this one included.

    The pass must have had no masks to fill, so that it saw all tokens of the block, and must have changed none of them.
    """
    return not had_masks and (not changed or passes >= MAX_EDIT_PASSES)
