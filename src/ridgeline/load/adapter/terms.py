"""The changes that an adapter makes to a model, by our names of weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

Floats = np.ndarray[Any, np.dtype[np.float32]]


@dataclass(frozen=True, slots=True)
class Term:
    """A low-rank term of one matrix W [out, in]: the product becomes W x + up (down x) + add.

    down: [r, in]. up: [out, r], with the scale. add: [out], or None. magnitude: lengths [out] that the rows of
    W + up down have afterwards (DoRA, arXiv:2402.09353), or None. table: whether W is the transpose of a table of
    embeddings [in, out].
    """

    down: Floats
    up: Floats
    add: Floats | None = None
    magnitude: Floats | None = None
    table: bool = False

    @property
    def rank(self) -> int:
        return len(self.down)

    def gain(self, matrix: Floats) -> Floats | None:
        """Return the factor on each row [out] of W + up down; None without magnitudes. matrix: W [out, in]."""
        if self.magnitude is None:
            return None
        lengths = np.linalg.norm(matrix + self.up @ self.down, axis=1).astype(np.float32)
        gain: Floats = self.magnitude / lengths
        return gain

    def merged(self, matrix: Floats) -> Floats:
        """Return W with the term in it, [out, in]."""
        whole = matrix + self.up @ self.down
        gain = self.gain(matrix)
        return whole if gain is None else whole * gain[:, None]
