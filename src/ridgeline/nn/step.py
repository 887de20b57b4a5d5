"""Inputs of a forward pass (tokens, positions, views of state), and the stream between layers. Nothing is global."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

from ridgeline.nn.rotary import FrequencyTables
from ridgeline.ops.api import Array, DenseRows, Kept, PagedRows, PageTarget, Segments, States
from ridgeline.spec.storage import KVScales

Rows = DenseRows | PagedRows
WritePages = Callable[[Sequence[Array], Sequence[Array], Array, Array, KVScales], None]  # ops.api.WRITE_PAGES
Shared = Mapping[int, Rows]  # keys and values by the layer that owns them
NOTHING: Shared = {}


class Embedded(NamedTuple):
    """The parts of the layers' own embeddings of the step's tokens, [T, layers * size] each.

    projected: the part that the stream before the first layer gives. rows: rows of the table.
    """

    projected: Array
    rows: Array


class Stream(NamedTuple):
    """The residual stream, and the delta of the last branch, which the next stage adds.

    shared: keys and values that later layers also read. embedded: the layers' own embeddings, if they read any. aux:
    streams [T, width] before chosen layers, in the order in which `Model.forward` was given their ids. aside: the
    result of a shortcut, [T, width], which the next layer with a channel mixer adds to its delta. held: the
    result of the mixer before, which the next layer, beside it, adds after its own mixer.
    """

    residual: Array
    delta: Array | None
    shared: Shared = NOTHING
    embedded: Embedded | None = None
    aux: tuple[Array, ...] = ()
    aside: Array | None = None
    held: Array | None = None


class Step(Protocol):
    """The tokens of all sequences of one forward pass, flattened to T, and views of their state."""

    @property
    def token_ids(self) -> Array:
        """Return the id of each token, [T]."""
        ...

    @property
    def positions(self) -> Array:
        """Return the position of each token in its sequence, [T]."""
        ...

    @property
    def signal(self) -> Array | None:
        """Return the mean embedding of each token's last prediction, [T, width], in a pass over canvases; else None."""
        ...

    @property
    def adapters(self) -> Array | None:
        """Return the slot of each token's adapter, [T], -1 for a token without one; None if no token has one."""
        ...

    @property
    def token_types(self) -> Array | None:
        """Return the type of each token, [T], for an encoder that has a table of them; None: all are 0."""
        ...

    @property
    def segments(self) -> Segments:
        """Return the division of the tokens into sequences."""
        ...

    def frequency_rows(self, tables: FrequencyTables) -> Array:
        """Return each token's row, [T], in the tables of a model whose rotations follow the lengths of sequences."""
        ...

    def read_state(self, layer: int, parts: Sequence[tuple[int, ...]]) -> tuple[States, Kept]:
        """Return the states from which the N sequences of a step continue, [N, *shape] each, and the kept inputs of
        accepted drafts, which run before the step's tokens."""
        ...

    def write_state(self, layer: int, states: States, keep: Kept) -> None:
        """Store the states after the step, and the inputs of its drafts."""
        ...

    def target(self, layer: int, scales: KVScales) -> PageTarget | None:
        """Return the pages that the tokens' parts go to; None for a step without pages."""
        ...

    def append_kv(self, layer: int, write: WritePages, scales: KVScales, *parts: Array) -> Rows:
        """Append the tokens' parts, [T, *shape] each, to a layer's state, and return the state that the layer reads.

        write: the layer's kernel that writes pages. Steps without pages do not use it. scales: the layer's, for fp8.
        parts: none if they are in the pages of `target` already.
        """
        ...
