"""Sequences of the simulator: tokens are only counted, and the workload gives the keys of pages."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ridgeline.sched.sequence import PageKey, Sequence
from ridgeline.sim.workload import Request

ID_BITS = 40  # bits of the position in the key of a page that is not shared


class Counted:
    """A list of tokens of which only the number is known."""

    __slots__ = ("_count",)

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, part: slice) -> tuple[int, ...]:
        return (0,) * len(range(*part.indices(self._count)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Counted) and self._count == other._count

    __hash__ = None  # type: ignore[assignment]

    def extend(self, tokens: tuple[int, ...]) -> None:
        self._count += len(tokens)


@dataclass(slots=True, eq=False)
class CountedSequence(Sequence):
    """A sequence whose tokens are counted.

    blocks: numbers for the prompt's blocks of `block_tokens` tokens, each including all blocks before it, as in traces.
    Two sequences share the pages of their common first blocks. Tokens after the blocks are not shared.
    """

    blocks: tuple[int, ...] = ()
    block_tokens: int = 1
    num_shared: int = 0  # tokens of the blocks

    def __post_init__(self) -> None:
        self.num_prompt = self.num_prompt or len(self.tokens)
        self.bound = self.max_length = self.num_prompt + self.max_tokens
        self.num_shared = min(self.num_prompt, len(self.blocks) * self.block_tokens)

    @property
    def is_shared(self) -> bool:
        """Return whether the sequence has blocks."""
        return self.num_shared > 0

    def prefix_hash(self, position: int, grid: int) -> PageKey:
        """Return the key of the page that ends at `position`: from its block and offset, or unique to the sequence."""
        if position <= self.num_shared:
            block, offset = divmod(position - 1, self.block_tokens)
            key = self.blocks[block] * self.block_tokens + offset
        else:
            key = -((self.id << ID_BITS) + position)
        return f"{self.floor} {key}".encode() if self.floor else key

    def page_keys(self, first: int, stop: int, page_tokens: int, grid: int) -> Iterable[PageKey]:
        """Return the keys of pages [first, stop)."""
        if self.floor or first * page_tokens < self.num_shared:
            return Sequence.page_keys(self, first, stop, page_tokens, grid)
        own = self.id << ID_BITS
        return range(-own - (first + 1) * page_tokens, -own - (stop + 1) * page_tokens, -page_tokens)


def counted_sequence(number: int, request: Request) -> CountedSequence:
    """Return a sequence with id `number` for a request."""
    tokens: Any = Counted(request.prompt_tokens)
    return CountedSequence(
        number, tokens, request.output_tokens, blocks=request.blocks, block_tokens=request.block_tokens
    )
