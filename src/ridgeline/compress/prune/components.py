"""Rotate the residual stream to its principal components, of which the first ones are kept (SliceGPT, Ashkboos et al.,
arXiv:2401.15024).

The weights of a norm are divided by their mean and merged into the matrices that read it, so that the norm commutes
with the rotation. A head that is tied to the embedding cannot take them: the last norm then gets the closest diagonal.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ridgeline.compress.grid import Floats
from ridgeline.errors import RequestError
from ridgeline.spec import Layer, ModelSpec, ParallelLayer, RMSNorm
from ridgeline.spec.model import mlp_norm

GainOf = Callable[[str], Floats | None]
_TABLES = ("embed.weight", "position_embed.weight")


@dataclass(frozen=True, slots=True)
class Components:
    """The directions that are kept.

    basis: [hidden size, kept], float32, orthonormal columns. scale: factor on the weights of norms: a token of whose
    squared norm the share s is kept has sqrt(s x hidden size / kept) times its former root mean square. tied: whether
    the head is the embedding.
    """

    basis: Floats
    scale: float
    tied: bool

    def project(self, name: str, x: Floats, axis: int, gain_of: GainOf) -> Floats:
        """Return a weight in the new basis.

        axis: its axis of the hidden size. gain_of: returns the weights of a norm.
        """
        norm = _norm_before(name)
        if norm is None:  # a table, or a matrix that writes to the stream, or its bias
            return self._rotated(x, axis)
        gain = gain_of(norm)
        if norm == name:
            if norm == "norm.weight" and self.tied:
                return np.square(self.basis.T) @ x * np.float32(self.scale)
            return np.full(self.basis.shape[1], float(x.mean()) * self.scale, np.float32)
        if axis != x.ndim - 1:
            return self._rotated(x, axis)
        return (x if gain is None else x * (gain / gain.mean())) @ self.basis

    def _rotated(self, x: Floats, axis: int) -> Floats:
        found: Floats = np.moveaxis(np.tensordot(x, self.basis, (axis, 0)), -1, axis)
        return found


def _norm_before(name: str) -> str | None:
    """Return the name of the norm whose output a matrix reads, or the name itself for a norm; None for tables."""
    if name in _TABLES:
        return None
    if name in ("norm.weight", "head.weight"):
        return "norm.weight"
    layers, number, branch, *_ = name.split(".")
    return f"{layers}.{number}.{branch.removesuffix('_norm')}_norm.weight"


def components(spec: ModelSpec, moment: Floats, width: int) -> Components:
    """Return the first `width` principal directions of the stream.

    moment: [hidden size, hidden size], the second moment of the stream, with every token scaled to norm 1.
    """
    values, vectors = np.linalg.eigh(moment.astype(np.float64))
    share = float(values[-width:].sum() / values.sum())
    scale = math.sqrt(share * len(moment) / width)
    return Components(vectors[:, -width:][:, ::-1].astype(np.float32), scale, spec.tie_word_embeddings)


def check_rotatable(spec: ModelSpec) -> None:
    """Raise RequestError for a model whose stream cannot be rotated: RMS norms without an offset must stand before each
    branch, and nowhere else.
    """
    for i, layer in enumerate(spec.layers):
        other = getattr(layer, "post_norm", None) is not None or getattr(layer, "one_norm", False)
        if (
            not isinstance(layer, Layer | ParallelLayer)
            or other
            or not all(map(_is_plain, (layer.pre_norm, mlp_norm(layer))))
        ):
            raise _not_plain(f"layer {i} of {spec.family} has others")
    if not _is_plain(spec.norm):
        raise _not_plain(f"the last norm of {spec.family} is another one")


def is_rotatable(spec: ModelSpec) -> bool:
    """Return whether `check_rotatable` finds nothing."""
    try:
        check_rotatable(spec)
    except RequestError:
        return False
    return True


def _not_plain(why: str) -> RequestError:
    return RequestError(
        f"--channels components needs RMS norms without an offset before each branch and at the end, and {why}: take "
        "--channels importance"
    )


def _is_plain(norm: object) -> bool:
    return isinstance(norm, RMSNorm) and not norm.offset
