"""Run a model over calibration sequences part by part: one branch of one layer at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ridgeline.compress.inputs import Complete, MatrixKey, Observer
from ridgeline.nn.capture import Capture
from ridgeline.nn.model import residual_scale
from ridgeline.nn.single import layer_block
from ridgeline.nn.step import Stream
from ridgeline.ops import OpsTable, api
from ridgeline.runtime.load import LoadedModel
from ridgeline.runtime.step import DenseStep
from ridgeline.spec import Layer, ModelSpec, Weight

BATCH_TOKENS = 2048  # tokens of one forward pass


@dataclass(frozen=True, eq=False)
class Part:
    """The part of a layer that is quantized at once: a branch, or the whole layer where branches depend on each other.

    branch: "mixer" or "mlp"; "" for a whole layer. spec: the model with nothing else in this layer. weights: the
    weights of the part.
    """

    index: int
    branch: str
    spec: ModelSpec
    weights: tuple[Weight, ...]

    @property
    def name(self) -> str:
        return f"layers.{self.index}" + (f".{self.branch}" if self.branch else "")

    @property
    def matrices(self) -> tuple[Weight, ...]:
        """Return the matrices that may be rounded."""
        return tuple(w for w in self.weights if w.may_be_rounded)


def parts(spec: ModelSpec) -> Iterator[Part]:
    """Yield the parts of all layers in the order in which they run."""
    for i, layer in enumerate(spec.layers):
        own = tuple(w for w in spec.weights() if w.name.startswith(f"layers.{i}."))
        if (
            not isinstance(layer, Layer)
            or layer.mixer is None
            or layer.mlp is None
            or layer.embedded
            or layer.out_scale
            or layer.beside
            or layer.mlp_scale is not None
        ):
            yield Part(i, "", spec, own)
            continue
        before, after = spec.layers[:i], spec.layers[i + 1 :]
        mixer = replace(spec, layers=(*before, replace(layer, mlp=None), *after))
        # A model needs some mixer. Layers behind might share the keys and values of this one, and are left out.
        mlp = replace(spec, layers=(*before, replace(layer, mixer=None), layer))
        for branch, part in (("mixer", mixer), ("mlp", mlp)):
            names = (f"layers.{i}.{branch}.", f"layers.{i}.{branch}_norm.", f"layers.{i}.{branch}_post_norm.")
            yield Part(i, branch, part, tuple(w for w in own if w.name.startswith(names)))


def keys_of(weight: Weight) -> Iterator[MatrixKey]:
    """Yield the matrices of a weight: one, or one for each expert."""
    if len(weight.shape) == 2:
        yield MatrixKey(weight.name)
    else:
        yield from (MatrixKey(weight.name, e) for e in range(weight.shape[0]))


class Calibration:
    """The residual streams of calibration sequences on their way through a model.

    Args:
        loaded: a model that builds its layers as they are needed.
        sequences: token ids.
        streams: the streams to continue with; None: those before the first layer.
    """

    def __init__(
        self, loaded: LoadedModel, sequences: Sequence[Sequence[int]], streams: list[Stream] | None = None
    ) -> None:
        self._model = loaded.model
        self._add = loaded.table.primitive(api.ADD)
        per_batch = max(1, BATCH_TOKENS // max(map(len, sequences)))
        every = [sequences[i : i + per_batch] for i in range(0, len(sequences), per_batch)]
        self.steps: list[DenseStep] = [loaded.dense_step(some) for some in every]
        self.streams = streams or [self._model.begin(step) for step in self.steps]

    def first(self, num_tokens: int) -> int:
        """Return how many batches contain at least `num_tokens` tokens, at most all."""
        total = 0
        for i, step in enumerate(self.steps):
            total += sum(step.lengths)
            if total >= num_tokens:
                return i + 1
        return len(self.steps)

    def run(
        self, part: Part, weights: Mapping[str, Any], table: OpsTable, batches: slice = slice(None),
        capture: Capture | None = None,
    ) -> Iterator[Stream]:  # fmt: skip
        """Yield the stream after a part for each batch.

        batches: which batches. capture: receives the inputs of matrices that it asks for.
        """
        block = layer_block(self._model, part.spec, part.index, weights, table, capture)
        scale = residual_scale(part.spec.layers[part.index])
        for i in range(len(self.steps))[batches]:  # nothing holds the stream of a batch that was replaced meanwhile
            stream = self.streams[i]
            found = block(stream, self.steps[i])
            residual = found.residual if found.delta is None else self._add(found.residual, found.delta, scale)
            yield found._replace(residual=residual, delta=None)

    def observe(
        self, part: Part, weights: Mapping[str, Any], table: OpsTable, capture: Capture, observer: Observer
    ) -> None:
        """Let an observer receive the inputs of matrices in all batches. A pass ends when it has them all."""
        block = layer_block(self._model, part.spec, part.index, weights, table, capture)
        for step, stream in zip(self.steps, self.streams, strict=True):
            observer.begin()
            with suppress(Complete):  # what follows the last input is not needed
                block(stream, step)

    def advance(self, part: Part, weights: Mapping[str, Any], table: OpsTable) -> None:
        """Replace each stream by the one after a part."""
        for i, stream in enumerate(self.run(part, weights, table)):
            if not np.isfinite(np.asarray(stream.residual)).all():
                raise FloatingPointError(part.name)
            self.streams[i] = stream
