"""Which keys a windowed layer sees, where they are not simply those of its window. One type each.

Distances and places are those of tokens in their sequence, whatever a cache holds: a key never changes, so prefixes are
shared under every pattern. Each answers what it keeps of a sequence; what it sees is ops/reference/primitives.py:sees.
"""

from __future__ import annotations

from dataclasses import dataclass

from ridgeline.spec.state import ALL


@dataclass(frozen=True, slots=True)
class FirstTokens:
    """The window, and the first `count` tokens of the sequence (StreamingLLM, arXiv:2309.17453).

    That work counts places inside its cache; here first tokens stay where they are.
    """

    count: int

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ValueError(f"the first tokens that stay visible must be at least 1, not {self.count}")

    def lookback(self, window: int) -> int:
        return window - 1

    def seen(self, context: int, window: int) -> int:
        """Keys that the last of `context` tokens sees."""
        return min(context, window + self.count)


@dataclass(frozen=True, slots=True)
class Dilated:
    """`window` keys, `step` tokens apart: distances 0, step, 2 step, ... (Longformer, arXiv:2004.05150)."""

    step: int

    def __post_init__(self) -> None:
        if self.step < 1:
            raise ValueError(f"the step of a dilated window must be at least 1, not {self.step}")

    def lookback(self, window: int) -> int:
        return (window - 1) * self.step

    def seen(self, context: int, window: int) -> int:
        """Keys that the last of `context` tokens sees."""
        return min(-(-context // self.step), window)


@dataclass(frozen=True, slots=True)
class Strided:
    """The window, and all keys at a distance that is a multiple of `stride` (Sparse Transformer, arXiv:1904.10509, 5.2:
    its two heads merged).
    """

    stride: int

    def __post_init__(self) -> None:
        if self.stride < 1:
            raise ValueError(f"the stride of a pattern must be at least 1, not {self.stride}")

    def lookback(self, window: int) -> int:
        return ALL

    def seen(self, context: int, window: int) -> int:
        """Keys that the last of `context` tokens sees."""
        inside = min(context, window)
        return inside + -(-context // self.stride) - -(-inside // self.stride)


Pattern = FirstTokens | Dilated | Strided
