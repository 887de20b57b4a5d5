"""Complete the weights of a model, and keep track of those that are still in memory."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from ridgeline.ops.api import Array, Memory, QuantizedMatrix, QuantizedStack
from ridgeline.spec import ModelSpec


class WithConstants(Mapping[str, Array]):
    """Weights, and the vectors of norms without weights, which are made when they are read."""

    def __init__(self, weights: Mapping[str, Array], spec: ModelSpec, memory: Memory) -> None:
        self._weights, self._memory = weights, memory
        self._constants = {w.name: w for w in spec.constants()}

    def __getitem__(self, name: str) -> Array:
        own = self._constants.get(name)
        if own is None:
            return self._weights[name]
        return self._memory.put(np.full(own.shape, own.constant, np.float32), "float32", "float32")

    def __iter__(self) -> Iterator[str]:
        yield from self._weights
        yield from self._constants

    def __len__(self) -> int:
        return len(self._weights) + len(self._constants)


class HeldWeights(Mapping[str, Array]):
    """Weights, with weak references to those that were read: reading them again might read a file again."""

    def __init__(self, weights: Mapping[str, Array]) -> None:
        self._weights = weights
        self._found: dict[str, weakref.ref[Any]] = {}

    def __getitem__(self, name: str) -> Array:
        found = self._weights[name]
        self._found[name] = weakref.ref(found)
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)

    def alive(self) -> list[Array]:
        """Return the arrays of the weights that are still referenced elsewhere."""
        held = [weight for weight in (ref() for ref in self._found.values()) if weight is not None]
        return [
            array for w in held for array in (w.arrays if isinstance(w, QuantizedMatrix | QuantizedStack) else (w,))
        ]
