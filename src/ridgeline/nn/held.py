"""Complete the weights of a model, and keep track of those that are still in memory."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from ridgeline.ops.api import Array, Memory, QuantizedMatrix, QuantizedStack
from ridgeline.spec import ModelSpec
from ridgeline.spec.weight import SINUSOIDS


def sinusoids(rows: int, width: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Return a table of positions [rows, width]: row p has sin(p f) and then cos(p f), and a zero if the width is odd.

    The frequencies f fall from 1 to 1 / 10,000 in equal ratios (tensor2tensor; arXiv:1706.03762 has another order).
    """
    half = width // 2
    frequencies = np.exp(np.arange(half, dtype=np.float32) * np.float32(-math.log(10_000) / max(half - 1, 1)))
    angles = np.arange(rows, dtype=np.float32)[:, None] * frequencies
    return np.concatenate((np.sin(angles), np.cos(angles), np.zeros((rows, width % 2), np.float32)), 1)


class WithConstants(Mapping[str, Array]):
    """Weights, and what no checkpoint has: vectors of norms without weights, and sinusoids. They are made when they
    are read.
    """

    def __init__(self, weights: Mapping[str, Array], spec: ModelSpec, memory: Memory) -> None:
        self._weights, self._memory = weights, memory
        self._constants = {w.name: w for w in spec.constants()}

    def __getitem__(self, name: str) -> Array:
        own = self._constants.get(name)
        if own is None:
            return self._weights[name]
        if own.constant == SINUSOIDS:
            return self._memory.put(sinusoids(*own.shape), "float32", "float32")
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
