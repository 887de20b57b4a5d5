"""Define how far ahead a token of a layer sees. One type for each way: attention in most models is causal.

A row of keys and values depends on all tokens that its token sees. So the rows of a block are final once all tokens of
the block are known, and those of a whole sequence never are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

BEYOND = 1 << 60  # a distance that no sequence reaches


@dataclass(frozen=True, slots=True)
class Causal:
    """A token sees itself and all tokens before it."""

    @property
    def block(self) -> int:
        """Return the number of neighboring tokens that all see each other."""
        return 1

    def last(self, position: Any) -> Any:
        """Return the last position that the token at `position` sees: of an integer, or of an array of them."""
        return position

    def attended(self, tokens: int, context: int) -> int:
        """Return the number of pairs of a token and one that it sees, for the last `tokens` of `context` tokens."""
        return context * (context + 1) // 2 - (context - tokens) * (context - tokens + 1) // 2


@dataclass(frozen=True, slots=True)
class Blocks:
    """A token sees all tokens of its own block, and all blocks before it (block diffusion, arXiv:2503.09573).

    Args:
        size: Tokens of a block. Block i holds positions [i * size, (i + 1) * size).
    """

    size: int

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"the size of a block must be at least 1, not {self.size}")

    @property
    def block(self) -> int:
        """Return the number of neighboring tokens that all see each other."""
        return self.size

    def last(self, position: Any) -> Any:
        """Return the last position that the token at `position` sees: of an integer, or of an array of them."""
        return position // self.size * self.size + (self.size - 1)

    def attended(self, tokens: int, context: int) -> int:
        """Return the number of pairs of a token and one that it sees, for the last `tokens` of `context` tokens.

        Nobody sees beyond the context, which may end within a block.
        """
        first = context - tokens
        begin, end = -(-first // self.size), context // self.size  # whole blocks
        if begin > end:
            return tokens * context  # all tokens are in the last block, which is not complete
        whole = self.size * self.size * (end * (end + 1) - begin * (begin + 1)) // 2
        before, after = begin * self.size - first, context - end * self.size
        return before * begin * self.size + whole + after * context


@dataclass(frozen=True, slots=True)
class WholeSequence:
    """A token sees all tokens of its sequence, also those after it (LLaDA, arXiv:2502.09992)."""

    @property
    def block(self) -> int:
        """Return the number of neighboring tokens that all see each other."""
        return BEYOND

    def last(self, position: Any) -> Any:
        """Return the last position that the token at `position` sees: of an integer, or of an array of them."""
        return position + BEYOND

    def attended(self, tokens: int, context: int) -> int:
        """Return the number of pairs of a token and one that it sees, for the last `tokens` of `context` tokens."""
        return tokens * context


Sight = Causal | Blocks | WholeSequence
CAUSAL = Causal()
