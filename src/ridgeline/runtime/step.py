"""The dense Step: whole sequences, no cache. State is returned, not written, so the pass stays differentiable."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ridgeline.ops.api import Array, DenseKeyValues, Memory


@dataclass(frozen=True, slots=True)
class DenseStep:
    """One forward pass over whole sequences of any lengths, laid end to end."""

    token_ids: Array
    positions: Array
    lengths: tuple[int, ...]

    @classmethod
    def build(cls, sequences: Sequence[Sequence[int]], memory: Memory) -> DenseStep:
        """`sequences`: token ids of each, none empty."""
        lengths = tuple(len(s) for s in sequences)
        tokens = np.fromiter((t for s in sequences for t in s), np.int64, sum(lengths))
        positions = np.concatenate([np.arange(n) for n in lengths])
        return cls(memory.integers(tokens), memory.integers(positions), lengths)

    def last_rows(self, memory: Memory) -> Array:
        """The row of each sequence's last token."""
        return memory.integers(np.cumsum(self.lengths) - 1)

    def extend(self, layer: int, keys: Array, values: Array) -> DenseKeyValues:
        return DenseKeyValues(keys, values, self.lengths)
