"""What a layer must remember of a sequence: shapes, a number and a flag; pools and planners derive the rest."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

ALL = 1 << 60  # a lookback that no sequence reaches


@dataclass(frozen=True, slots=True)
class State:
    """State of one layer for one sequence.

    parts: shapes of the arrays kept per token, or per sequence where `snapshot` is set; they lie one after the other.
    lookback: how many already computed tokens the next token reads.
    snapshot: the state is one summary of everything before it (recurrent layers), not a row per token.
    first_tokens: of the sequence, which are read for ever, besides.
    """

    parts: tuple[tuple[int, ...], ...]
    lookback: int = ALL
    snapshot: bool = False
    first_tokens: int = 0

    @property
    def elements(self) -> int:
        """Numbers kept per token, or per sequence where `snapshot` is set."""
        return sum(prod(shape) for shape in self.parts)

    def rows_at(self, num_tokens: int) -> int:
        """Of a sequence of `num_tokens` tokens, those of which something is kept; of a snapshot 1."""
        return 1 if self.snapshot else min(num_tokens, self.lookback + self.first_tokens)

    def elements_at(self, num_tokens: int) -> int:
        """Numbers kept for a sequence of `num_tokens` tokens."""
        return self.elements * self.rows_at(num_tokens)
