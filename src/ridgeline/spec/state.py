"""What a layer must remember of a sequence, as two numbers and a flag; pools and planners derive the rest."""

from __future__ import annotations

from dataclasses import dataclass

ALL = 1 << 60  # a lookback that no sequence reaches


@dataclass(frozen=True, slots=True)
class State:
    """State of one layer for one sequence.

    elements: numbers kept per token, or per sequence where `snapshot` is set.
    lookback: how many already computed tokens the next token reads.
    snapshot: the state is one summary of everything before it (recurrent layers), not a row per token.
    first_tokens: of the sequence, which are read for ever, besides.
    """

    elements: int
    lookback: int = ALL
    snapshot: bool = False
    first_tokens: int = 0

    def elements_at(self, num_tokens: int) -> int:
        """Numbers kept for a sequence of `num_tokens` tokens."""
        return self.elements if self.snapshot else self.elements * min(num_tokens, self.lookback + self.first_tokens)
