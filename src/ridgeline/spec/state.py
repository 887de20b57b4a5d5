"""Describe the state that a layer keeps of a sequence. Page pools and planners derive all else from it."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

ALL = 1 << 60  # a lookback that no sequence reaches


@dataclass(frozen=True, slots=True)
class State:
    """State of one layer for one sequence.

    parts: shapes of the arrays kept per token, or per sequence if `snapshot` is set, in their order in memory.
    lookback: how many already computed tokens the next token reads.
    snapshot: the state is one summary of everything before it (recurrent layers), not a row per token.
    first_tokens: number of first tokens of the sequence that every later token reads, whatever the lookback.
    block: how many neighboring tokens see each other, so that their rows are final together (spec/sight.py).
    """

    parts: tuple[tuple[int, ...], ...]
    lookback: int = ALL
    snapshot: bool = False
    first_tokens: int = 0
    block: int = 1

    @property
    def elements(self) -> int:
        """Return how many numbers are kept per token, or per sequence if `snapshot` is set."""
        return sum(prod(shape) for shape in self.parts)

    def rows_at(self, num_tokens: int) -> int:
        """Return for how many of `num_tokens` tokens a row is kept; 1 for a snapshot."""
        return 1 if self.snapshot else min(num_tokens, self.lookback + self.first_tokens)

    def elements_at(self, num_tokens: int) -> int:
        """Return the numbers that are kept for a sequence of `num_tokens` tokens."""
        return self.elements * self.rows_at(num_tokens)
