"""Norms of queries and keys as part of their matrices, which is an approximation: a norm is not linear."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ridgeline.compress.changed import SameWeights
from ridgeline.compress.convert.latent.moments import BATCH_TOKENS, Doubles
from ridgeline.compress.deliver import OnProgress
from ridgeline.compress.folder import stored_types
from ridgeline.compress.grid import Floats
from ridgeline.nn import Capture, Model
from ridgeline.nn.capture import INPUT
from ridgeline.plan import rewrite
from ridgeline.runtime.load import LoadedModel
from ridgeline.spec import Attention, Norm, RMSNorm

# Weight of the matrices whose norm is its mean, against that of the text, as a share of the mean square of an input.
PRIOR = 0.01


class LinearWeights(SameWeights):
    """The weights of a model without norms of q and k.

    matrices: the matrices that do instead what they and the norms did, by name.
    """

    def __init__(self, original: LoadedModel, matrices: Mapping[str, Floats]) -> None:
        spec = rewrite.without_qk_norms(original.spec)
        super().__init__(spec, original.model.weights, stored_types(original), original.table.memory.get)
        self._matrices = matrices

    def computed(self, name: str) -> Floats:
        return self._matrices[name] if name in self._matrices else super().computed(name)


def linear_weights(
    original: LoadedModel, layers: Mapping[int, Attention], gain: Callable[[int], Any],
    sequences: Sequence[Sequence[int]], on_progress: OnProgress,
) -> LinearWeights:  # fmt: skip
    """Return the model without norms of q and k.

    On a text, the matrices give the least squares of what they and the norms gave. Without one, each norm divides by
    what it would be in the mean for inputs without correlations.

    Args:
        layers: attention layers with such norms.
        gain: returns the size of each number of a layer's inputs [width].
        sequences: a text; none for no text.
    """
    parts = {(i, part): _Part(original, i, own, part) for i, own in layers.items() for part in ("q", "k")}
    if not sequences:
        return LinearWeights(
            original, {part.name: part.folded(np.diag(gain(i) ** 2)) for (i, _), part in parts.items()}
        )
    width = original.spec.hidden_size
    inputs = {i: np.zeros((width, width)) for i in layers}
    across = {key: np.zeros((len(part.matrix), width)) for key, part in parts.items()}

    def receive(name: str, x: Any) -> None:
        layer = int(name.split(".")[1])
        found = original.table.memory.get(x).astype(np.float64)
        inputs[layer] += found.T @ found
        for part in ("q", "k"):
            across[layer, part] += parts[layer, part].normed(found).T @ found

    capture = Capture(original.spec, [f"layers.{i}.mixer.k{INPUT}" for i in layers], receive)
    model = Model(original.spec, original.model.weights, original.table, original.max_model_len, capture=capture)
    per_batch = max(1, BATCH_TOKENS // max(map(len, sequences)))
    for at in range(0, len(sequences), per_batch):
        on_progress("reading norms of queries and keys", at, len(sequences))
        model.forward(original.dense_step(sequences[at : at + per_batch]), capture)
    return LinearWeights(
        original, {part.name: part.fitted(inputs[i], across[i, name]) for (i, name), part in parts.items()}
    )


class _Part:
    """The queries or the keys of a layer: a matrix [rows, width] and a norm."""

    def __init__(self, original: LoadedModel, layer: int, own: Attention, part: str) -> None:
        def get(name: str) -> Doubles:
            return np.asarray(original.table.memory.get(original.model.weights[name]), np.float64)

        assert own.qk_norm is not None
        prefix = f"layers.{layer}.mixer.{part}"
        self.name, self.matrix, self._norm = f"{prefix}.weight", get(f"{prefix}.weight"), own.qk_norm
        heads = own.num_heads if part == "q" else own.num_kv_heads
        self._heads = heads if own.qk_norm_over == "head" else 1
        self._weight = get(f"{prefix}_norm.weight")
        bias = f"{prefix}_norm.bias"
        self._bias = get(bias) if bias in original.model.weights else np.zeros(len(self._weight))

    def normed(self, x: Doubles) -> Doubles:
        """Return what inputs [T, width] give [T, rows]."""
        heads = (x @ self.matrix.T).reshape(len(x), self._heads, -1)
        found: Doubles = _normed(self._norm, heads) * self._gain + self._bias
        return found.reshape(len(x), -1)

    def folded(self, inputs: Doubles) -> Floats:
        """Return the matrix after a norm that divides each head by its root mean square. inputs: mean of x x^T."""
        parts = self.matrix.reshape(self._heads, -1, self.matrix.shape[1])
        if not isinstance(self._norm, RMSNorm):
            parts = parts - parts.mean(axis=1, keepdims=True)
        square = np.einsum("hiw,wv,hiv->h", parts, inputs, parts) / parts.shape[1]
        found: Doubles = parts / np.sqrt(square + self._norm.eps)[:, None, None] * self._gain[:, None]
        folded: Floats = found.reshape(self.matrix.shape).astype(np.float32)
        return folded

    def fitted(self, inputs: Doubles, across: Doubles) -> Floats:
        """Return the matrix that comes closest on a text. inputs: sum of x x^T; across: sum of normed(x) x^T."""
        count = np.trace(inputs) / len(inputs)
        prior = self.folded(inputs / count).astype(np.float64)
        scale = np.einsum("ij,ij->", across, prior) / max(float(np.einsum("ij,jk,ik->", prior, inputs, prior)), 1e-300)
        damped = inputs + np.eye(len(inputs)) * PRIOR * count
        found: Floats = np.linalg.solve(damped, (across + PRIOR * count * scale * prior).T).T.astype(np.float32)
        return found

    @property
    def _gain(self) -> Doubles:
        return self._weight + getattr(self._norm, "offset", 0.0)


def _normed(norm: Norm, x: Doubles) -> Doubles:
    """Return heads [..., rows] after a norm, without its weights."""
    if not isinstance(norm, RMSNorm):
        x = x - x.mean(axis=-1, keepdims=True)
    found: Doubles = x / np.sqrt(np.square(x).mean(axis=-1, keepdims=True) + norm.eps)
    return found
