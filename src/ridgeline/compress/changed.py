"""The weights of a model that is made from another one, each computed when it is asked for."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from ridgeline.compress.grid import Floats
from ridgeline.ops.host.memory import dtype_of
from ridgeline.spec import ModelSpec
from ridgeline.spec.dtype import DType


class ChangedWeights(Mapping[str, Any]):
    """The weights of the new model by our names, of which none is kept.

    Args:
        spec: the new model.
        kept: indices of the layers of the original that its layers come from, in order.
        types: the type in which each weight is stored, by its name in the original; matrices are of this type, and
            vectors are float32 that were rounded to it.
    """

    def __init__(self, spec: ModelSpec, kept: tuple[int, ...], types: Mapping[str, DType]) -> None:
        self.spec, self.kept, self.types = spec, kept, types
        self._by_name = {w.name: w for w in spec.weights()}

    @abstractmethod
    def computed(self, name: str) -> Floats:
        """Return a weight of the new model in float32, before it is rounded to its type."""

    def __getitem__(self, name: str) -> Any:
        own = self._by_name[name]
        found = self.computed(name)
        if found.shape != own.shape:
            raise ValueError(f"{name} is {found.shape}, but {own.shape} in the new model")
        stored = np.ascontiguousarray(found).astype(dtype_of(self.type_of(name)))
        return stored if own.is_matrix else stored.astype(np.float32)

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_name)

    def __len__(self) -> int:
        return len(self._by_name)

    def type_of(self, name: str) -> DType:
        """Return the type in which a weight of the new model is stored."""
        return self.types[self.old_name(name)]

    def old_name(self, name: str) -> str:
        """Return the name in the original of a weight of the new model."""
        if not name.startswith("layers."):
            return name
        _, number, rest = name.split(".", 2)
        return f"layers.{self.kept[int(number)]}.{rest}"


class SameWeights(ChangedWeights):
    """The weights of the original under a spec that uses them otherwise.

    weights: the weights of the original. widen: returns an array of the original as float32.
    """

    def __init__(
        self, spec: ModelSpec, weights: Mapping[str, Any], types: Mapping[str, DType], widen: Callable[[Any], Floats]
    ) -> None:
        super().__init__(spec, tuple(range(len(spec.layers))), types)
        self._weights, self._widen = weights, widen

    def computed(self, name: str) -> Floats:
        return self._widen(self._weights[name])
