"""What a forward pass receives: the tokens, where they stand, and where their state lies; and what goes from layer to
layer. Nothing is global.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

from ridgeline.nn.rotary import FrequencyTables
from ridgeline.ops.api import Array, DenseRows, Kept, PagedRows, Segments, States

Rows = DenseRows | PagedRows
WritePages = Callable[[Sequence[Array], Sequence[Array], Array, Array], None]  # ops.api.WRITE_PAGES
Shared = Mapping[int, Rows]  # by the layer whose state they are
NOTHING: Shared = {}


class Stream(NamedTuple):
    """The residual stream, and what the last branch wants to add to it: the next stage does the addition.

    shared: keys and values that later layers read too.
    """

    residual: Array
    delta: Array | None
    shared: Shared = NOTHING


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

    @property
    def segments(self) -> Segments:
        """Which tokens belong to which sequence."""
        ...

    def frequency_rows(self, tables: FrequencyTables) -> Array:
        """[T], each token's row in the tables of a model whose rotations follow the lengths of sequences."""
        ...

    def read_state(self, layer: int, parts: Sequence[tuple[int, ...]]) -> tuple[States, Kept]:
        """The states of a recurrent layer, [N, *shape] each, with which the step's N sequences go on, and what was kept
        of accepted drafts, which come first."""
        ...

    def write_state(self, layer: int, states: States, keep: Kept) -> None:
        """Record the states that the step leaves, and what is to be kept of its drafts."""
        ...

    def append_kv(self, layer: int, write: WritePages, *parts: Array) -> Rows:
        """Record what the tokens add to a layer's state, each part [T, *shape] as its spec says; what it reads then.

        write: the layer's kernel for pages, where there are any.
        """
        ...
