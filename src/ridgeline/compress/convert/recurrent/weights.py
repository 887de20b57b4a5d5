"""The weights of a model in which recurrent layers stand in place of attention."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ridgeline.compress.changed import SameWeights
from ridgeline.compress.convert.options import ConvertOptions
from ridgeline.compress.convert.recurrent.fit import Fitting
from ridgeline.compress.convert.recurrent.keep import kept_layers
from ridgeline.compress.convert.recurrent.start import KINDS, random_weights
from ridgeline.compress.convert.windows import check_lengths
from ridgeline.compress.data import Samples
from ridgeline.compress.deliver import OnProgress
from ridgeline.compress.folder import stored_types
from ridgeline.compress.grid import Floats
from ridgeline.errors import RequestError
from ridgeline.plan import rewrite
from ridgeline.runtime.load import LoadedModel
from ridgeline.spec import ModelSpec
from ridgeline.spec.dtype import DType


class RecurrentWeights(SameWeights):
    """The weights of a model with recurrent layers in place of attention.

    made: the weights of the mixers of converted layers, by layer and by name. Other weights are those of the original.
    """

    def __init__(
        self, spec: ModelSpec, weights: Mapping[str, Any], types: Mapping[str, DType], widen: Callable[[Any], Floats],
        made: Mapping[int, Mapping[str, Any]],
    ) -> None:  # fmt: skip
        super().__init__(spec, weights, types, widen)
        self._made = made

    def computed(self, name: str) -> Floats:
        layer, part = _split(name)
        if layer not in self._made:
            return super().computed(name)
        return np.asarray(self._made[layer][part], np.float32)

    def old_name(self, name: str) -> str:
        layer, _ = _split(name)
        return f"layers.{layer}.mixer.q.weight" if layer in self._made else name


def _split(name: str) -> tuple[int, str]:
    """Return the layer and the name within the mixer of a weight; -1 for one that belongs to no mixer."""
    layer, found, part = name.removeprefix("layers.").partition(".mixer.")
    return (int(layer), part) if found else (-1, "")


@dataclass(frozen=True, slots=True)
class Hybrid:
    """The recurrent layers that a model gets.

    kind: their mixer. many: recurrent layers for each one that keeps its attention; None: all. window: window of the
    layers that keep their attention; None: they stay as they are.
    """

    kind: str
    many: int | None = None
    window: int | None = None

    @property
    def text(self) -> str:
        """Return the change as `--to` takes it."""
        many = f":{self.many}" if self.many else ""
        if self.window is None:
            return f"hybrid={self.kind}{many}"
        return f"linear={'' if self.kind == rewrite.LINEAR[0] else self.kind + ':'}{self.window}{many}"


def recurrent_weights(
    original: LoadedModel, to: Hybrid, samples: Samples | None, options: ConvertOptions, on_progress: OnProgress
) -> RecurrentWeights:
    """Return the model with recurrent layers.

    Raises RequestError for a kind or a model that cannot be converted, without a text, and with sequences that are not
    longer than the window.
    """
    recurrent, layers = check_model(original.spec, to.kind, to.text)
    if samples is None:
        raise RequestError(f"--to {to.text} is fitted to what the model does on a text: name some with --calibrate")
    if to.window is not None:
        check_lengths(to.text, to.window, samples)
    spec, given = original.spec, (original.model.weights, stored_types(original), original.table.memory.get)

    def changed(made: ModelSpec, weights: Mapping[int, Mapping[str, Any]]) -> RecurrentWeights:
        return RecurrentWeights(made, *given, weights)

    every = rewrite.with_recurrent(spec, recurrent, None)
    fitted = Fitting(original, every, KINDS[recurrent], samples.calibration, changed, on_progress).fit()

    def without(kept: Collection[int]) -> RecurrentWeights:
        """Return the model in which these layers keep their attention."""
        made = rewrite.with_recurrent(spec, recurrent, None, {layers.index(i) for i in kept})
        if kept and to.window is not None:
            made = rewrite.with_windows(made, to.window, None)
        return changed(made, {i: w for i, w in fitted.items() if i not in kept})

    kept = kept_layers(original, layers, to.many, without, samples, options, on_progress)
    found = without(kept)
    if options.start == "attention":
        return found
    weights = {i: random_weights(w, options.seed, i) for i, w in fitted.items() if i not in kept}
    return changed(found.spec, weights)


def check_model(spec: ModelSpec, kind: str, to: str) -> tuple[rewrite.Recurrent, list[int]]:
    """Return the kind and the attention layers. Raises RequestError, which names the reason, for a model that cannot be
    converted.
    """
    known = [name for name in rewrite.RECURRENT if name != "mamba"]
    if kind == "mamba":
        raise RequestError(
            f"--to {to}: Mamba has a decay for each channel and no heads, so that it cannot begin as attention; use "
            f"{', '.join(known)}"
        )
    recurrent = next((name for name in known if name == kind), None)
    if recurrent is None:
        raise RequestError(
            f"--to {to:.60}: {kind!r:.30} is not a recurrent mixer that is known; use {', '.join(known)}"
        )
    layers = [i for i in range(len(spec.layers)) if spec.attention(i)]
    shared = [i for i in layers if spec.state_layer(i) != i]
    if shared:
        raise RequestError(
            f"--to {to}: layer {shared[0]} shares keys and values with another one; such layers do not become recurrent"
        )
    if not layers:
        raise RequestError(f"--to {to}: {spec.family} has no attention layer with KV heads")
    return recurrent, layers
