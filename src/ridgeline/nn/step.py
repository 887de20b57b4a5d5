"""What a forward pass receives: the tokens, where they stand, and where their state lies. Nothing is global."""

from __future__ import annotations

from typing import Protocol

from ridgeline.ops.api import Array, DenseKeyValues, PagedKeyValues


class Step(Protocol):
    """The tokens of all sequences of one forward pass, flattened to T, and views of their state."""

    @property
    def token_ids(self) -> Array:
        """[T]"""
        ...

    @property
    def positions(self) -> Array:
        """[T], each token's place in its own sequence."""
        ...

    def extend(self, layer: int, keys: Array, values: Array) -> DenseKeyValues | PagedKeyValues:
        """Record the new keys and values [T, K, D] of a layer; what its attention reads."""
        ...
