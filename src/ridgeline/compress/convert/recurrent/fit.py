"""Fit recurrent layers to attention on a text: the decay of each head, and the matrix that reads all heads.

Each layer gets the stream of the original, so that all layers are fitted in the same passes. Both fits are least
squares: a head takes the decay with which its numbers explain most of what the attention head gave, and the last matrix
comes closest to what the whole layer gave.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ridgeline.compress.convert.recurrent.start import Kind, Projections, projections
from ridgeline.compress.convert.recurrent.taylor import Matrix
from ridgeline.compress.deliver import OnProgress
from ridgeline.nn import Capture, Model, PassingModel
from ridgeline.nn.capture import EMBED, INPUT
from ridgeline.runtime.load import LoadedModel
from ridgeline.spec import Attention, ModelSpec

BATCH_TOKENS = 2048  # tokens of a forward pass
DAMPING = 1e-3  # share of the mean square of a number that is added to each in least squares

Weights = Mapping[str, Matrix]  # of a mixer, by name


@dataclass(slots=True)
class _Products:
    """Sums over tokens: of the numbers of a layer with themselves, and with what they must give."""

    own: Any = 0.0
    across: Any = 0.0

    def add(self, x: Matrix, y: Matrix) -> None:
        """Add tokens. x and y: [..., tokens, numbers]."""
        turned = x.swapaxes(-1, -2)
        self.own, self.across = self.own + turned @ x, self.across + turned @ y

    def solve(self) -> Matrix:
        """Return the matrix [..., numbers, results] that comes closest."""
        size = self.own.shape[-1]
        mean = np.trace(self.own, axis1=-2, axis2=-1)[..., None, None] / size
        found: Matrix = np.linalg.solve(self.own + np.eye(size) * np.maximum(DAMPING * mean, 1e-12), self.across)
        return found

    def explained(self) -> Matrix:
        """Return how much of the squares of the results is explained, [...]."""
        found: Matrix = (self.solve() * self.across).sum(axis=(-1, -2))
        return found


@dataclass(slots=True)
class _Inputs:
    """Sums over the inputs of a layer."""

    count: int = 0
    total: Any = 0.0
    square: Any = 0.0


@dataclass(slots=True)
class _Seen:
    """Results of a pass of the original: the stream before each layer, and captured arrays by name."""

    streams: list[Any]
    by_name: Mapping[str, Any]


class Fitting:
    """Fits recurrent mixers to the attention layers of a model.

    Args:
        original: the model.
        spec: the model with recurrent mixers in every attention layer.
        kind: the kind of these mixers.
        sequences: the text.
        changed: returns a mapping of weights for `spec` from those of converted layers.
    """

    def __init__(
        self, original: LoadedModel, spec: ModelSpec, kind: Kind, sequences: Sequence[Sequence[int]],
        changed: Callable[[ModelSpec, Mapping[int, Weights]], Mapping[str, Any]], on_progress: OnProgress,
    ) -> None:  # fmt: skip
        self.original, self.spec, self._kind = original, spec, kind
        self._changed, self._on_progress = changed, on_progress
        per_batch = max(1, BATCH_TOKENS // max(map(len, sequences)))
        self._batches = [sequences[i : i + per_batch] for i in range(0, len(sequences), per_batch)]
        whole = original.spec
        self.layers: dict[int, Attention] = {i: own for i in range(len(whole.layers)) if (own := whole.attention(i))}

    @property
    def _out(self) -> str:
        return f"{self._kind.out}.weight"

    def projections(self) -> dict[int, Projections]:
        """Return what each attention layer multiplies its inputs by."""
        sums = {i: _Inputs() for i in self.layers}
        for seen, _ in self._seen("reading inputs", [f"layers.{i}.mixer.q{INPUT}" for i in self.layers]):
            for i, one in sums.items():
                x = seen.by_name[f"layers.{i}.mixer.q{INPUT}"]
                one.count += len(x)
                one.total, one.square = one.total + x.sum(axis=0), one.square + x.T @ x
        return {
            i: projections(
                own,
                self._reader(i),
                sums[i].total / sums[i].count,
                sums[i].square / sums[i].count,
                self.original.max_model_len,
            )
            for i, own in self.layers.items()
        }

    def fit(self) -> dict[int, Weights]:
        """Return the fitted weights of each converted layer, the last matrix included."""
        own = self.projections()
        starts = self._with_rates(own, self._rates(own))
        products = {i: _Products() for i in self.layers}
        for seen, batch in self._seen("fitting layers", [f"layers.{i}.mixer" for i in self.layers]):
            found = self._apart(starts, seen, batch)
            for i, one in products.items():
                one.add(found[i], seen.by_name[f"layers.{i}.mixer"])
        return {i: {**starts[i], self._out: products[i].solve().T} for i in self.layers}

    def _rates(self, own: Mapping[int, Projections]) -> dict[int, Matrix]:
        """Return the rate of decay of each head of each layer."""
        rates = self._kind.rates
        equal = [{i: np.full(own[i].q.shape[0], rate) for i in self.layers} for rate in rates]
        if len(rates) == 1:
            return equal[0]
        tried = [self._with_rates(own, each) for each in equal]
        products = [{i: _Products() for i in self.layers} for _ in tried]
        for seen, batch in self._seen("choosing decays", [f"layers.{i}.mixer.o{INPUT}" for i in self.layers]):
            for weights, each in zip(tried, products, strict=True):
                found = self._apart(weights, seen, batch)
                for i, one in each.items():
                    heads = (
                        _by_head(x, self.layers[i]) for x in (found[i], seen.by_name[f"layers.{i}.mixer.o{INPUT}"])
                    )
                    one.add(*heads)
        return {
            i: np.asarray(rates)[np.argmax([each[i].explained() for each in products], axis=0)] for i in self.layers
        }

    def _with_rates(self, own: Mapping[int, Projections], rates: Mapping[int, Matrix]) -> dict[int, Weights]:
        return {
            i: {**self._kind.weights(self.spec.layers[i].mixer, own[i], rates[i]), self._out: own[i].out}
            for i in self.layers
        }

    def _seen(self, what: str, names: Sequence[str]) -> Iterator[tuple[_Seen, Sequence[Sequence[int]]]]:
        """Run the original over the text, and yield what each pass gave with its sequences. Arrays are float64."""
        original, count = self.original, len(self.original.spec.layers)
        streams = [EMBED, *(f"layers.{i}" for i in range(count - 1))]
        capture = Capture(original.spec, [*streams, *names])
        model = PassingModel(
            original.spec, original.model.weights, original.table, original.max_model_len, capture=capture
        )
        for i, batch in enumerate(self._batches):
            self._on_progress(what, i, len(self._batches))
            model.forward(original.dense_step(batch), capture)
            found = {name: self._array(capture.outputs[name]) for name in names}
            yield _Seen([capture.outputs[name] for name in streams], found), batch

    def _apart(self, weights: Mapping[int, Weights], seen: _Seen, batch: Sequence[Sequence[int]]) -> dict[int, Matrix]:
        """Return the inputs of the last matrix of each converted layer on the streams of the original."""
        names = {f"layers.{i}.mixer.{self._kind.out}{INPUT}": i for i in self.layers}
        capture = Capture(self.spec, names)
        table, longest = self.original.table, self.original.max_model_len
        model: Model = PassingModel(self.spec, self._changed(self.spec, weights), table, longest, capture=capture)
        for _ in model.run_apart(self.original.dense_step(batch), seen.streams):
            pass
        return {i: self._array(capture.outputs[name]) for name, i in names.items()}

    def _array(self, x: Any) -> Matrix:
        return np.asarray(self.original.table.memory.get(x), np.float64)

    def _reader(self, layer: int) -> Callable[[str], Matrix | None]:
        weights = self.original.model.weights

        def read(name: str) -> Matrix | None:
            key = f"layers.{layer}.mixer.{name}"
            return self._array(weights[key]) if key in weights else None

        return read


def _by_head(x: Matrix, own: Attention) -> Matrix:
    """Reshape [tokens, heads * size] to [heads, tokens, size]."""
    return x.reshape(len(x), own.num_heads, -1).transpose(1, 0, 2)
