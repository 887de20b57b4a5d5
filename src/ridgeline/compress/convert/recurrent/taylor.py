"""The weights of linear attention whose features are the Taylor expansion of softmax attention (BASED).

Attention weighs a key by exp(s), where s is the score of a query and a key, and TaylorAttention by 1 + s + s^2 / 2. The
two agree to the second order of the scores. Three things differ, and each has its best answer in closed form:

- Scores are smallest if the keys of a text have a mean of 0. A mean that is removed adds the same to all scores of a
  query, which softmax does not see.
- Queries and keys are rotated by their positions, and linear attention cannot rotate. A head's scores take the mean
  rotation over distances d, each with the weight exp(-rate d).
- A head has more numbers than features have. The scores that stay are those of least squares over the text: a truncated
  singular value decomposition, in the metric of the inputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ridgeline.compress.convert.latent.moments import pair_order
from ridgeline.nn.rotary import frequencies
from ridgeline.spec import Attention

Matrix = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True, slots=True)
class Scores:
    """The scores of an attention layer over a text: scale_h q_h(x)^T R k_h(y), R the rotation by a distance.

    attention: the layer. scale: factor of each head [heads] on products of its unit queries and keys. mean: the mean
    input [width]. square: the mean product of inputs with themselves [width, width]. length: longest context in tokens.
    """

    attention: Attention
    scale: Matrix
    mean: Matrix
    square: Matrix
    length: int

    def rotation(self, rate: float) -> Matrix:
        """Return the mean rotation [head size, head size] over distances d with weights exp(-rate d)."""
        own = self.attention
        order = pair_order(own.rope, own.head_dim)
        found = np.eye(own.head_dim)
        if own.rope is None:
            return found
        angles, factor = frequencies(own.rope, self.length)
        turns = (1 - np.exp(-rate)) / (1 - np.exp(1j * angles.astype(np.float64) - rate)) * factor**2
        for pair, turn in enumerate(turns):
            both = order[2 * pair : 2 * pair + 2]
            found[np.ix_(both, both)] = [[turn.real, turn.imag], [-turn.imag, turn.real]]
        return found


def reduced(q: Matrix, k: Matrix, scores: Scores, constant: Matrix, rates: Matrix, size: int) -> tuple[Matrix, Matrix]:
    """Return queries and keys [heads, size, width] whose products, divided by sqrt(size), come closest to the scores.

    Args:
        q, k: matrices of unit queries and keys [heads, head size, width]. constant: u [width] with u x close to 1.
        rates: how fast the weights of distances decay, for each head [heads].
    """
    roots = [_root(scores.square - shift) for shift in (0.0, np.outer(scores.mean, scores.mean))]
    queries, keys = np.zeros((2, len(q), size, q.shape[-1]))
    for head, rate in enumerate(rates):
        centered = k[head] - np.outer(k[head] @ scores.mean, constant)
        turn = scores.rotation(float(rate))
        left, right = (np.linalg.qr(root @ x.T)[1] for root, x in zip(roots, (q[head], centered), strict=True))
        u, s, v = np.linalg.svd(left @ turn @ right.T, full_matrices=False)
        kept = min(size, int((s > 1e-9 * max(float(s[0]), 1e-300)).sum()))
        shares = np.sqrt(scores.scale[head] * np.sqrt(size) / s[:kept])[:, None]
        queries[head, :kept] = shares * (v[:kept] @ right @ turn.T @ q[head])
        keys[head, :kept] = shares * (u[:, :kept].T @ left @ turn @ centered)
    return queries, keys


def _root(square: Matrix) -> Matrix:
    """Return a matrix R with R^T R equal to a symmetric matrix, whose eigenvalues below 0 count as 0."""
    values, vectors = np.linalg.eigh(square)
    found: Matrix = np.sqrt(np.maximum(values, 0.0))[:, None] * vectors.T
    return found
