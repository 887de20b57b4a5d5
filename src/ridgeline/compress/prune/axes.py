"""Which rows of weights are kept: those of the units that are kept, and the axes of the hidden size."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from ridgeline.errors import RequestError
from ridgeline.spec import ModelSpec
from ridgeline.spec.axes import Axis, Unit

Indices = np.ndarray[tuple[int, ...], np.dtype[np.int64]]
Kept = Mapping[Unit, Indices]


def rows_of(axis: Axis, kept: Kept) -> Indices:
    """Return the indices of the rows of an axis that are kept."""
    found, start = [], 0
    for unit, count, block in axis:
        units = np.arange(count) if unit is None or unit not in kept else kept[unit]
        found.append((start + units[:, None] * block + np.arange(block)).reshape(-1))
        start += count * block
    return np.concatenate(found).astype(np.int64)


def width_axes(spec: ModelSpec) -> dict[str, int]:
    """Return the axis of the hidden size of each weight that has one, by the weight's full name.

    Raises RequestError for a weight with two such axes.
    """
    found: dict[str, int] = {"embed.weight": 1, "position_embed.weight": 1, "head.weight": 1}
    for name, shape, wider in _twice(spec):
        different = [axis for axis, (a, b) in enumerate(zip(shape, wider, strict=True)) if a != b]
        if len(different) > 1:
            raise RequestError(f"{name} has two axes of the hidden size, so that the width cannot be pruned")
        if different:
            found[name] = different[0]
    return found


def _twice(spec: ModelSpec) -> Iterator[tuple[str, tuple[int, ...], tuple[int, ...]]]:
    """Yield the shapes of all weights of norms and layers as they are, and with a hidden size that is larger by 1."""
    width = spec.hidden_size
    for a, b in zip(spec.norm.weights("norm", width), spec.norm.weights("norm", width + 1), strict=True):
        yield a.name, a.shape, b.shape
    for i, layer in enumerate(spec.layers):
        for a, b in zip(layer.weights(width), layer.weights(width + 1), strict=True):
            yield f"layers.{i}.{a.name}", a.shape, b.shape
