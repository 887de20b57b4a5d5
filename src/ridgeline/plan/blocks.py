"""Describe block diffusion to the planner: how many tokens a pass over a block keeps.

A block of `size` tokens takes size / tokens_per_pass passes. Each computes the rows of the block, and logits for all of
them. The first pass also computes the rows of the block before it once more, as final (sched/blocks.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from ridgeline.errors import RequestError


@dataclass(frozen=True, slots=True)
class BlockPasses:
    """Passes over blocks. Raises RequestError for values out of range.

    size: tokens of a block. tokens_per_pass: mean tokens that a pass keeps, from 1 to `size`.
    """

    size: int
    tokens_per_pass: float = 1.0

    def __post_init__(self) -> None:
        if self.size < 1:
            raise RequestError(f"the block has {self.size} tokens; use at least 1")
        if not 1 <= self.tokens_per_pass <= self.size:
            raise RequestError(
                f"a pass keeps {self.tokens_per_pass:g} tokens; it keeps from 1 to {self.size}, those of a block"
            )

    @property
    def passes(self) -> float:
        """Return the mean number of passes over a block."""
        return self.size / self.tokens_per_pass
