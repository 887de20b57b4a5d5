"""The parts of a pass over a canvas: the signal of the last pass, and the mean embedding of a prediction."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ridgeline.ops import OpsTable, api
from ridgeline.ops.api import Array, Weights
from ridgeline.ops.stages import MLPBlock
from ridgeline.spec import CanvasDiffusion, ModelSpec, RMSNorm

Floats = np.ndarray[Any, np.dtype[np.float32]]
ROWS = 4096  # rows of the embedding that are looked up at once


class Conditioning:
    """Adds what the last pass predicted to the stream before the first layer: norm(x + mlp(norm(signal))).

    weights: matrices of the MLP, and the weights of the norm before it under "norm".
    """

    def __init__(self, canvas: CanvasDiffusion, width: int, weights: Weights, table: OpsTable) -> None:
        self._mlp = table.stage(api.MLP_BLOCK, MLPBlock(canvas.conditioning, canvas.norm, 1.0), weights)
        self._add, self._zeros = table.primitive(api.ADD), table.memory.zeros((width,))
        self._norm = table.primitive(api.NORM, RMSNorm(canvas.norm.eps, offset=1.0))

    def __call__(self, x: Array, signal: Array) -> Array:
        """Return the stream of the tokens of canvases. signal: [T, width]."""
        _, delta = self._mlp(signal, None)
        return self._norm(self._add(x, delta, 1.0), self._zeros, None)


class Soften:
    """Computes mean embeddings [n, width] of n distributions over the vocabulary, which are float32 on the host.

    lookup: returns rows of the embedding.
    """

    def __init__(self, spec: ModelSpec, lookup: Callable[[Array], Array], table: OpsTable) -> None:
        self.vocab_size, self.width = spec.vocab_size, spec.hidden_size
        self._factor, self._lookup, self._memory = spec.embedding_scale, lookup, table.memory
        self._mix, self._add = table.primitive(api.MIX), table.primitive(api.ADD)
        self._scale = table.primitive(api.SCALE)

    def __call__(self, chances: Floats) -> Floats:
        total: Array | None = None
        for start in range(0, self.vocab_size, ROWS):
            ids = np.arange(start, min(start + ROWS, self.vocab_size))
            some = np.ascontiguousarray(chances[:, ids[0] : ids[-1] + 1], np.float32)
            part = self._mix(self._memory.put(some, "float32", "float32"), self._lookup(self._memory.integers(ids)))
            total = part if total is None else self._add(total, part, 1.0)
        assert total is not None
        return self._memory.get(self._scale(total, self._factor))
