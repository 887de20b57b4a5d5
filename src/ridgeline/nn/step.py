"""What a forward pass receives: the tokens, where they stand, and where their state lies. Nothing is global."""

from __future__ import annotations

from typing import Protocol

from ridgeline.ops.api import Array, DenseRows, PagedRows


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

    def extend(self, layer: int, *parts: Array) -> DenseRows | PagedRows:
        """Record what the tokens add to a layer's state, each part [T, *shape] as its spec says; what it reads then."""
        ...
