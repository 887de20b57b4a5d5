"""The parts that all heads are made of: matrices, norms, and the table from draft tokens to the target's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ridgeline.nn.binding import bind
from ridgeline.nn.held import HeldWeights
from ridgeline.ops import OpsTable, api
from ridgeline.ops.api import Array, HeadStage, Product, Weights
from ridgeline.ops.stages import Head
from ridgeline.quant import store
from ridgeline.quant.linear import StoredLinear
from ridgeline.spec import Norm, Weight
from ridgeline.spec.quant import FormatTable


class Parts:
    """Builds the parts of one head from its weights.

    vocabulary: the target's token of each draft token; None where they are the same.
    """

    def __init__(
        self, weights: HeldWeights, table: OpsTable, formats: FormatTable,
        vocabulary: np.ndarray[Any, np.dtype[np.int64]] | None,
    ) -> None:  # fmt: skip
        self.weights, self.table, self.vocabulary = weights, table, vocabulary
        self._formats = formats
        self._tokens = None if vocabulary is None else table.memory.integers(vocabulary.reshape(-1, 1).copy())
        self._look_up = table.primitive(api.DECODE_LAYOUT)
        self._any = table.memory.integers(np.zeros(1, np.int64))  # a row whose whole table is returned, and not used

    def under(self, prefix: str) -> Mapping[str, Array]:
        """Return the weights whose names begin with `prefix` and a dot."""
        return {name: self.weights[name] for name in self.weights if name.startswith(f"{prefix}.")}

    def stage(self, prefix: str, norm: str | None = None) -> Weights:
        """Return the weights of a stage under `prefix`, with those of the norm that has the name `norm`."""
        own = dict(self.under(prefix)) | (dict(self.under(norm)) if norm else {})
        return bind(own, self.table, prefix, norm or "no norm", self._formats)

    def linear(self, name: str) -> StoredLinear:
        """Return a matrix with its bias."""
        matrix, bias = self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias")
        return store(matrix, bias, self.table, self._formats.of(Weight(f"{name}.weight", tuple(matrix.shape))))

    def product(self, name: str) -> Product:
        """Return the product with a matrix, bias included."""
        linear = self.linear(name)
        linear.prepare()
        return linear.apply

    def norm(self, case: Norm, name: str) -> tuple[Any, Array]:
        """Return the kernel of a norm, and its weight."""
        return self.table.primitive(api.NORM, case), self.weights[f"{name}.weight"]

    def head(self, name: str, norm: Norm | None) -> HeadStage:
        """Return the stage of an output matrix, after a norm with the name `norm` if there is one."""
        arrays = {"norm.weight": self.weights["norm.weight"]} if norm else {}
        return self.table.stage(api.HEAD, Head(norm, 1.0, 1.0, None), Weights({"head": self.linear(name)}, arrays))

    def to_target(self, ids: Array) -> Array:
        """Return the target's tokens of draft tokens [n], on the device."""
        if self._tokens is None or self.vocabulary is None:
            return ids
        # The table is read as page tables of one page each, so that a recorded step can contain the lookup.
        return self._look_up(self._tokens, ids, ids, self._any, len(self.vocabulary))[0]

    def constants(self) -> list[Array]:
        """Return all arrays that a step reads besides its inputs, except those that kernels own."""
        return [*self.weights.alive(), *([] if self._tokens is None else [self._tokens, self._any])]
