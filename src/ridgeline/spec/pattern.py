"""Define which keys a layer with a window sees, where they are not simply the last ones. One type for each pattern.

Distances and positions are those of tokens in their sequence, whatever a cache holds: a key never changes, so prefixes
are shared under every pattern. ops/reference/primitives.py:sees says which keys one query sees.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ridgeline.spec.state import ALL


@dataclass(frozen=True, slots=True)
class FirstTokens:
    """The window, and the first `count` tokens of the sequence (StreamingLLM, arXiv:2309.17453).

    StreamingLLM counts positions inside its cache; here the first tokens keep their positions.
    """

    count: int

    measures_distances: ClassVar[bool] = False  # whether ops compute the distance of each query to each key

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ValueError(f"the first tokens that stay visible must be at least 1, not {self.count}")

    @property
    def first_tokens(self) -> int:
        """Return how many first tokens of a sequence are never dropped."""
        return self.count

    def lookback(self, window: int) -> int:
        """Return how many computed tokens the next token reads, the first tokens aside."""
        return window - 1

    def attended(self, count: int, window: int) -> int:
        """Return the sum of the keys that queries 1..count see."""
        return capped(count, window + self.count)


@dataclass(frozen=True, slots=True)
class Dilated:
    """`window` keys, `step` tokens apart: distances 0, step, 2 step, ... (Longformer, arXiv:2004.05150)."""

    step: int

    measures_distances: ClassVar[bool] = True
    first_tokens: ClassVar[int] = 0

    def __post_init__(self) -> None:
        if self.step < 1:
            raise ValueError(f"the step of a dilated window must be at least 1, not {self.step}")

    def lookback(self, window: int) -> int:
        """Return how many computed tokens the next token reads."""
        return (window - 1) * self.step

    def attended(self, count: int, window: int) -> int:
        """Return the sum of the keys that queries 1..count see."""
        whole = self.step * window  # from here on, a query sees `window` keys
        return _strides(min(count, whole), self.step) + max(count - whole, 0) * window


@dataclass(frozen=True, slots=True)
class Strided:
    """The window, and all keys at a distance that is a multiple of `stride` (Sparse Transformer, arXiv:1904.10509, 5.2:
    its two heads merged).
    """

    stride: int

    measures_distances: ClassVar[bool] = True
    first_tokens: ClassVar[int] = 0

    def __post_init__(self) -> None:
        if self.stride < 1:
            raise ValueError(f"the stride of a pattern must be at least 1, not {self.stride}")

    def lookback(self, window: int) -> int:
        """Return how many computed tokens the next token reads: all of them."""
        return ALL

    def attended(self, count: int, window: int) -> int:
        """Return the sum of the keys that queries 1..count see."""
        near, beyond = min(count, window), max(count - window, 0)
        far = _strides(count, self.stride) - _strides(near, self.stride) - beyond * -(-near // self.stride)
        return capped(count, window) + far


@dataclass(frozen=True, slots=True)
class Chunked:
    """The keys of the query's own chunk: the sequence consists of chunks of `window` tokens (Llama 4)."""

    measures_distances: ClassVar[bool] = False
    first_tokens: ClassVar[int] = 0

    def lookback(self, window: int) -> int:
        """Return how many computed tokens the next token reads: at most all others of its chunk."""
        return window - 1

    def attended(self, count: int, window: int) -> int:
        """Return the sum of the keys that queries 1..count see."""
        whole, rest = divmod(count, window)
        return whole * capped(window, window) + capped(rest, window)


Pattern = FirstTokens | Dilated | Strided | Chunked


def capped(count: int, most: int) -> int:
    """Return the sum of min(i, most) for i in 1..count."""
    rising = min(count, most)
    return rising * (rising + 1) // 2 + (count - rising) * most


def _strides(count: int, stride: int) -> int:
    """Return the sum of ceil(i / stride) for i in 1..count."""
    whole, rest = divmod(count, stride)
    return stride * whole * (whole + 1) // 2 + rest * (whole + 1)
