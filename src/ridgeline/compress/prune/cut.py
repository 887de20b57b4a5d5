"""Compute the weights of a pruned model from those of the original, each when it is asked for."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ridgeline.compress.changed import ChangedWeights
from ridgeline.compress.grid import Floats
from ridgeline.compress.prune.axes import Indices, Kept, rows_of, width_axes
from ridgeline.compress.prune.components import Components
from ridgeline.spec import ModelSpec
from ridgeline.spec.axes import axes_of
from ridgeline.spec.dtype import DType
from ridgeline.spec.model import mlp_norm

_LAYER = re.compile(r"layers\.(\d+)\.(.+)")


@dataclass(frozen=True, slots=True)
class LayerCut:
    """The parts that are kept of a layer.

    index: index of the layer in the original. kept: indices of the units that are kept, in order. mixed: by the name of
    a weight in the layer, [units, kept units], the factors with which each original unit is added to each kept one.
    """

    index: int
    kept: Kept = field(default_factory=dict)
    mixed: Mapping[str, Floats] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Cut:
    """Everything that the weights of a pruned model follow from, besides those of the original.

    spec: the pruned model. channels: indices of the channels of the stream that are kept; None: all of them.
    components: directions of the stream that are kept instead. factors: factors on the weights of norms, by their names
    in the original.
    """

    original: ModelSpec
    spec: ModelSpec
    layers: tuple[LayerCut, ...]
    channels: Indices | None = None
    components: Components | None = None
    factors: Mapping[str, float] = field(default_factory=dict)


class CutWeights(ChangedWeights):
    """The weights of a pruned model by our names, of which none is kept.

    Args:
        weights: the weights of the original.
        types: see `ChangedWeights`.
        widen: returns an array of the original as float32.
    """

    def __init__(
        self, cut: Cut, weights: Mapping[str, Any], types: Mapping[str, DType], widen: Callable[[Any], Floats]
    ) -> None:
        super().__init__(cut.spec, tuple(layer.index for layer in cut.layers), types)
        self.cut = cut
        self._weights, self._widen = weights, widen
        self._width = width_axes(cut.original)

    def computed(self, name: str) -> Floats:
        old, match = self.old_name(name), _LAYER.fullmatch(name)
        x = self._widen(self._weights[old])
        if self.cut.components is not None and old in self._width:
            x = self.cut.components.project(old, x, self._width[old], self._gain_of)
        if match is not None:
            layer = self.cut.layers[int(match[1])]
            x = self._cut_units(x, layer, match[2])
        if self.cut.channels is not None and old in self._width:
            x = np.take(x, self.cut.channels, axis=self._width[old])
        factor = self.cut.factors.get(old, 1.0)
        return x if factor == 1.0 else self._scaled(old, x, factor)

    def _gain_of(self, name: str) -> Floats | None:
        found = self._weights.get(name)
        return None if found is None else self._widen(found)

    def _scaled(self, name: str, x: Floats, factor: float) -> Floats:
        """Scale the weights of a norm, whose factor on the stream is its offset plus its weights."""
        offset = norm_offset(self.cut.original, name)
        return (x + offset) * np.float32(factor) - offset

    def _cut_units(self, x: Floats, layer: LayerCut, name: str) -> Floats:
        axes = axes_of(self.cut.original.layers[layer.index]).get(name, ())
        for i, axis in enumerate(axes):
            if axis is None or not any(run.unit in layer.kept for run in axis):
                continue
            if name in layer.mixed:
                x = _mixed(x, i, layer.mixed[name])
            elif axis[0].unit == "neurons":  # each expert keeps other neurons
                own = layer.kept["neurons"]
                own = own[layer.kept["experts"]] if "experts" in layer.kept else own
                own = own.reshape(len(own), *(own.shape[1] if n == i else 1 for n in range(1, x.ndim)))
                x = np.take_along_axis(x, own, axis=i)
            else:
                x = np.take(x, rows_of(axis, layer.kept), axis=i)
        return x


def norm_offset(spec: ModelSpec, name: str) -> np.float32:
    """Return what the norm with this weight adds to its weights: 1 for Gemma, which stores them without it."""
    match = _LAYER.fullmatch(name)
    layer: Any = None if match is None else spec.layers[int(match[1])]
    if layer is None:
        norm: Any = spec.norm
    elif match and match[2].startswith("mixer.gate_norm"):
        norm = layer.mixer.norm
    else:
        own = mlp_norm(layer) if match and match[2].startswith("mlp_norm.") else layer.pre_norm
        norm = layer.post_norm if match and "_post_norm." in match[2] else own
    return np.float32(getattr(norm, "offset", 0.0))


def _mixed(x: Floats, axis: int, factors: Floats) -> Floats:
    """Return a weight whose kept units are sums of all units along an axis, times factors [units, kept units]."""
    rows = np.moveaxis(x, axis, 0)
    parts = rows.reshape(len(factors), -1)  # a unit and everything in it
    found = (factors.T @ parts).reshape(-1, *rows.shape[1:]).astype(np.float32)
    return np.moveaxis(found, 0, axis)
