"""Low-rank terms of several adapters beside the matrices of a model; the slot of each token decides which it gets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from ridgeline.nn.wrapped import Wrapped, WrappedProduct
from ridgeline.ops import OpsTable, api
from ridgeline.ops.api import Array, Linear, Product, SlotTerms

Floats = np.ndarray[Any, np.dtype[np.float32]]


class SlotTerm(NamedTuple):
    """The term of one adapter for a matrix [out, in]: the product y becomes gain * y + up (down x) + add.

    down: [r, in]. up: [out, r]. gain, add: [out].
    """

    down: Floats
    up: Floats
    gain: Floats
    add: Floats


class AdapterSlots:
    """Room for the terms of `count` adapters, for each matrix of the layers. A slot without an adapter changes nothing.

    max_rank: largest rank of a term. `slots` has the slot of each token of the pass that runs, [T], with -1 for tokens
    without an adapter; None if no token has one.
    """

    def __init__(self, table: OpsTable, count: int, max_rank: int) -> None:
        self.count, self.max_rank = count, max_rank
        self.slots: Array | None = None
        self.matrices: dict[str, AdaptedLinear] = {}
        self._table = table

    def around(self, name: str, linear: Linear) -> Linear:
        """Return a matrix with room for terms. name: the name of its weight."""
        self.matrices[name] = found = AdaptedLinear(linear, self, self._table)
        return found

    def put(self, slot: int, terms: Mapping[str, SlotTerm]) -> None:
        """Store an adapter's terms, by the names of weights; other matrices have none. Call it between steps."""
        for name, matrix in self.matrices.items():
            matrix.put(slot, terms.get(name))

    def arrays(self) -> Iterator[Array]:
        """Yield the arrays of all terms, which never move."""
        for matrix in self.matrices.values():
            yield from matrix.terms


class AdaptedLinear(Wrapped):
    """A matrix with terms of adapters; an `ops.api.Linear`."""

    def __init__(self, linear: Linear, slots: AdapterSlots, table: OpsTable) -> None:
        super().__init__(linear)
        (rows, columns), count, memory = linear.data.shape, slots.count, table.memory
        self.shape = int(rows), int(columns)
        down, up = (memory.zeros((count, slots.max_rank, int(n))) for n in (columns, rows))
        gain, add = (memory.zeros((count, int(rows))) for _ in range(2))
        self.terms = SlotTerms(down, up, gain, add, memory.integers(np.zeros(count, np.int64)))
        gains: Any = self.terms.gain
        gains[...] = 1.0
        self._slots, self._add = slots, table.primitive(api.ADD_TERMS)

    @property
    def unfused(self) -> str:
        return "has terms of adapters, which are added to the product before the rest of the stage"

    @property
    def apply(self) -> Product:
        return _AdaptedProduct(self._linear.apply, self, self._slots)

    def put(self, slot: int, term: SlotTerm | None) -> None:
        """Store the term of a slot."""
        terms: Any = self.terms
        down, up, gain, add, ranks = terms
        gain[slot], add[slot], ranks[slot] = 1.0, 0.0, 0
        if term is not None:
            rank = len(term.down)
            _assign(down[slot, :rank], term.down)
            _assign(up[slot, :rank], term.up.T)
            _assign(gain[slot], term.gain)
            _assign(add[slot], term.add)
            ranks[slot] = rank

    def added(self, y: Any, x: Any, slots: Array) -> Array:
        """Return the product y [..., out] of x [..., in] with the terms of each row's slot."""
        rows, inputs = y.reshape(-1, y.shape[-1]), x.reshape(-1, x.shape[-1])
        if rows.shape[0] != slots.shape[0]:
            raise ValueError(f"a product has {rows.shape[0]} rows, but the step has {slots.shape[0]} tokens")
        found: Any = self._add(rows, inputs, slots, self.terms)
        whole: Array = found.reshape(y.shape)
        return whole


class _AdaptedProduct(WrappedProduct):
    """A product with the terms of the pass that runs."""

    def __init__(self, product: Product, linear: AdaptedLinear, slots: AdapterSlots) -> None:
        super().__init__(product)
        self._linear, self._slots = linear, slots

    def __call__(self, x: Array) -> Array:
        y = self._product(x)
        return y if self._slots.slots is None else self._linear.added(y, x, self._slots.slots)


def _assign(target: Any, values: Floats) -> None:
    """Copy numbers of the host into an array of the device."""
    if isinstance(target, np.ndarray):
        target[...] = values
    else:
        target.copy_(target.new_tensor(values))
