"""Sum and join what the ranks of a model that is cut compute, in the order of the ranks, so that no sum depends on
timing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any, Protocol

import numpy as np

from ridgeline.nn.wrapped import Wrapped, WrappedProduct
from ridgeline.ops import OpsTable, api
from ridgeline.ops.api import Array, Linear, Product
from ridgeline.spec import ModelSpec

Ndarray = np.ndarray[Any, Any]
Lookup = Callable[[Array], Array]  # ids [n] -> rows [n, width]


class Group(Protocol):
    """The ranks that compute one model together. All ranks make the same calls in the same order."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...

    def gather(self, part: Ndarray) -> Sequence[Ndarray]:
        """Return the parts of all ranks, which have one shape and type, in the order of the ranks.

        They are valid until the next call. Raises RankError if another rank is lost.
        """
        ...

    def broadcast(self, message: object = None) -> Any:
        """Return the message that rank 0 passes; other ranks wait for it. Raises RankError if another rank is lost."""
        ...

    def leave(self) -> None:
        """Leave the group. Later calls of the other ranks, and of this one, raise RankError."""
        ...


class Ranks:
    """Adds and joins numbers of which each rank of a group has a part: deltas, rows of tables, logits."""

    def __init__(self, spec: ModelSpec, group: Group, table: OpsTable) -> None:
        self._spec, self._group, self._memory = spec, group, table.memory
        self._add, self._first = table.primitive(api.ADD), spec.rank * spec.vocab_rows

    def total(self, part: Array) -> Array:
        """Return the sum of the parts of all ranks, added in the order of the ranks."""
        parts = self._gather(part)
        return reduce(lambda total, one: self._add(total, one, 1.0), parts)

    def joined(self, logits: Array) -> Array:
        """Return logits [n, vocabulary] from the logits of each rank's rows of the head."""
        memory, parts = self._memory, self._group.gather(self._memory.to_host(logits))
        return memory.from_host(np.concatenate(parts, axis=-1)[..., : self._spec.vocab_size])

    def rows(self, lookup: Lookup) -> Lookup:
        """Return the lookup in a table of which each rank has some rows. lookup: looks up rows of this rank."""
        first, count = self._first, self._spec.vocab_rows

        def run(ids: Any) -> Array:
            own = ids - first
            is_own = (own >= 0) & (own < count)
            found: Any = lookup(own * is_own)
            return self.total(found * is_own[:, None])

        return run

    def summed(self, linear: Linear) -> Linear:
        """Return a matrix within a stage whose columns are cut, with the sum over ranks as its product."""
        return _Summed(linear, self)

    def _gather(self, part: Array) -> list[Array]:
        return [self._memory.from_host(one) for one in self._group.gather(self._memory.to_host(part))]


class _Summed(Wrapped):
    """A matrix whose product is summed over ranks; an `ops.api.Linear`."""

    def __init__(self, linear: Linear, ranks: Ranks) -> None:
        super().__init__(linear)
        self._ranks = ranks

    @property
    def unfused(self) -> str:
        return "is summed over ranks"

    @property
    def apply(self) -> Product:
        return _SummedProduct(self._linear.apply, self._ranks)


class _SummedProduct(WrappedProduct):
    """A product that is summed over ranks."""

    def __init__(self, product: Product, ranks: Ranks) -> None:
        super().__init__(product)
        self._ranks = ranks

    def __call__(self, x: Array) -> Array:
        return self._ranks.total(self._product(x))
