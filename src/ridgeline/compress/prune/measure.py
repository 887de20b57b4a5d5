"""Measure what the parts of a model give, in forward passes alone (Minitron, Muralidharan et al., arXiv:2407.14679).

A sequence counts with the mean over its tokens, and sequences are joined by their L2 norm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import numpy as np

from ridgeline.compress.grid import Floats
from ridgeline.compress.prune.axes import width_axes
from ridgeline.nn import Capture, Model
from ridgeline.nn.capture import EMBED, EXPERTS, INPUT, NORM, input_names
from ridgeline.ops import OpsTable, api
from ridgeline.quant import store
from ridgeline.runtime.load import LoadedModel
from ridgeline.runtime.step import DenseStep
from ridgeline.spec import ModelSpec, MoE
from ridgeline.spec.axes import Unit, unit_sizes
from ridgeline.spec.quant import PLAIN

BATCH_TOKENS = 2048  # tokens of a forward pass
Receive = Callable[[Floats], None]


class Score:
    """Sums a number for each unit: the mean over the tokens of a sequence, and over sequences the L2 norm."""

    def __init__(self) -> None:
        self._squares: Floats | float = 0.0

    def add(self, values: Floats, lengths: Sequence[int]) -> None:
        """Add numbers [T, ...] of sequences, one behind the other."""
        starts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
        sums = np.add.reduceat(values.astype(np.float64), starts, axis=0)
        self.add_means(sums / np.reshape(lengths, (-1, *(1,) * (values.ndim - 1))))

    def add_means(self, means: Floats) -> None:
        """Add means [sequences, ...]."""
        self._squares = self._squares + np.square(means).sum(axis=0)

    @property
    def value(self) -> Floats:
        """Return the score of each unit, float64."""
        return np.sqrt(self._squares)


class Mean:
    """The mean over all tokens."""

    def __init__(self) -> None:
        self._sum: Any = 0.0
        self._count = 0

    def add(self, values: Floats) -> None:
        """Add numbers [T, ...]."""
        self._sum, self._count = self._sum + values.sum(axis=0, dtype=np.float64), self._count + len(values)

    @property
    def value(self) -> Any:
        """Return the mean, float64."""
        return self._sum / max(1, self._count)


@dataclass(slots=True)
class Measured:
    """The measurements of a model.

    units: the score of each unit, by layer and kind. products: [heads, heads] by layer, the products of what two query
    heads give, summed over tokens and numbers. channels: the scores of the channels of the stream. layers: 1 - cosine
    of the stream before and after each layer. squares: mean square of each output of a norm, by the name of its
    weights. inputs: mean square of each input of a norm after a branch. moment: second moment of the stream, for
    components.
    """

    units: list[dict[Unit, Floats]]
    products: dict[int, Floats] = field(default_factory=dict)
    channels: Floats = field(default_factory=lambda: np.zeros(0))
    layers: Floats = field(default_factory=lambda: np.zeros(0))
    squares: dict[str, Floats] = field(default_factory=dict)
    inputs: dict[str, Floats] = field(default_factory=dict)
    moment: Floats | None = None


class Meter:
    """Receives the outputs and inputs of a model's parts, and sums what they say. See `measured`."""

    def __init__(self, spec: ModelSpec, loaded: LoadedModel, *, with_moment: bool) -> None:
        self._spec, self._table, self._weights = spec, loaded.table, loaded.model.weights
        self._lengths: tuple[int, ...] = ()
        self._handlers: dict[str, list[Receive]] = {}
        self._units: list[dict[Unit, Score]] = [{} for _ in spec.layers]
        self._products: dict[int, Floats] = {}
        self._channels: dict[str, Score] = {}
        self._squares: dict[str, Mean] = {}
        self._inputs: dict[str, Mean] = {}
        self._stream: Floats = np.zeros(0)
        self._angles = [Mean() for _ in spec.layers]
        self._moment = np.zeros((spec.hidden_size,) * 2) if with_moment else None
        self._num_moments = 0
        for i in range(len(spec.layers)):
            self._watch_layer(i)
        self._on(EMBED, self._begin)
        self._on(NORM, self._normed("norm"))
        for name, reader in _readers(spec).items():
            self._on(reader, self._normed(name))
        self.capture = Capture(spec, self._handlers, self._receive)

    def run(self, model: Model, loaded: LoadedModel, sequences: Sequence[Sequence[int]]) -> Iterator[int]:
        """Run sequences through a model that was built for this object's capture. Yield the tokens of each pass."""
        per_batch = max(1, BATCH_TOKENS // max(map(len, sequences)))
        for i in range(0, len(sequences), per_batch):
            batch = sequences[i : i + per_batch]
            self._lengths = tuple(map(len, batch))
            model.forward(loaded.dense_step(batch), self.capture)
            yield sum(self._lengths)

    def measured(self) -> Measured:
        """Return the results of all passes."""
        sites = [s.value for name, s in self._channels.items() if name != "norm"]
        return Measured(
            [{unit: score.value for unit, score in layer.items()} for layer in self._units], self._products,
            np.sum(sites, axis=0) if sites else np.zeros(self._spec.hidden_size),
            np.array([angle.value for angle in self._angles]),
            {f"{name}.weight": mean.value for name, mean in self._squares.items()},
            {f"{name}.weight": mean.value for name, mean in self._inputs.items()},
            None if self._moment is None else self._moment / self._num_moments,
        )  # fmt: skip

    def _on(self, name: str, receive: Receive) -> None:
        self._handlers.setdefault(name, []).append(receive)

    def _receive(self, name: str, x: Any) -> None:
        found = self._table.memory.get(x)
        for receive in self._handlers[name]:
            receive(found.reshape(-1, found.shape[-1]))

    def _watch_layer(self, i: int) -> None:
        layer, prefix = self._spec.layers[i], f"layers.{i}"
        self._on(prefix, lambda x: self._after(i, x))
        if getattr(layer, "post_norm", None) is not None:
            for branch in ("mixer", "mlp"):
                if getattr(layer, branch) is not None:
                    mean = self._inputs.setdefault(f"{prefix}.{branch}_post_norm", Mean())
                    self._on(f"{prefix}.{branch}", partial(_add_squares, mean))
        sizes = unit_sizes(layer)
        if queries := sizes.get("queries"):
            self._on(f"{prefix}.mixer.o{INPUT}", lambda x: self._heads(i, x, queries, sizes.get("keys", 0)))
        if states := sizes.get("state"):
            self._on(f"{prefix}.mixer.out{INPUT}", lambda x: self._add(i, "state", _lengths(x, states)))
        if "experts" in sizes:
            self._watch_experts(i, cast("MoE", layer.mlp))
        elif layer.mlp is not None:
            self._on(f"{prefix}.mlp.down{INPUT}", lambda x: self._add(i, "mlp", np.abs(x)))

    def _watch_experts(self, i: int, moe: MoE) -> None:
        prefix, routing = f"layers.{i}.mlp", _Routing(moe, self._table, self._weights, f"layers.{i}.mlp")
        score = self._units[i].setdefault("neurons", Score())
        sums: list[Floats] = []

        def routed(x: Floats) -> None:
            routing.route(x, self._lengths)
            self._add(i, "experts", routing.shares)
            sums.append(np.zeros((len(self._lengths), moe.num_experts, moe.intermediate_size)))

        def expert(e: int, x: Floats) -> None:
            rows = np.flatnonzero(routing.shares[:, e])[: len(x)]
            np.add.at(sums[0][:, e], routing.sequence[rows], np.abs(x[: len(rows)]) * routing.shares[rows, e, None])

        self._on(f"{prefix}.router{INPUT}", routed)
        for e in range(moe.num_experts):
            self._on(f"{prefix}.{EXPERTS}.{e}.down{INPUT}", partial(expert, e))
        self._on(NORM, lambda x: score.add_means(sums.pop() / np.reshape(routing.lengths, (-1, 1, 1))))
        if moe.shared is not None:
            self._on(f"{prefix}.shared.down{INPUT}", lambda x: self._add(i, "shared", np.abs(x)))

    def _add(self, i: int, unit: Unit, values: Floats) -> None:
        self._units[i].setdefault(unit, Score()).add(values, self._lengths)

    def _heads(self, i: int, x: Floats, heads: int, kv_heads: int) -> None:
        norms = _lengths(x, heads)
        self._add(i, "queries", norms)
        if kv_heads:
            self._add(i, "keys", _lengths(norms, kv_heads))
        by_head = x.reshape(len(x), heads, -1).astype(np.float64).swapaxes(0, 1).reshape(heads, -1)
        self._products[i] = self._products.get(i, 0.0) + by_head @ by_head.T

    def _normed(self, name: str) -> Receive:
        score, squares = self._channels.setdefault(name, Score()), self._squares.setdefault(name, Mean())

        def receive(x: Floats) -> None:
            score.add(np.abs(x), self._lengths)
            squares.add(np.square(x))

        return receive

    def _begin(self, x: Floats) -> None:
        self._stream = x.astype(np.float64)
        self._add_moment(self._stream)

    def _after(self, i: int, x: Floats) -> None:
        after, before = x.astype(np.float64), self._stream
        dots = (after * before).sum(1) / np.maximum(
            np.linalg.norm(after, axis=1) * np.linalg.norm(before, axis=1), 1e-30
        )
        self._angles[i].add(1 - dots)
        self._stream = after
        self._add_moment(after)

    def _add_moment(self, x: Floats) -> None:
        if self._moment is not None:
            units = x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-12)
            self._moment += units.T @ units
            self._num_moments += len(units)


class _Routing:
    """The shares with which the experts of a layer take part in each token of a pass."""

    def __init__(self, moe: MoE, table: OpsTable, weights: Any, prefix: str) -> None:
        bias, self._choice = weights.get(f"{prefix}.router.bias"), weights.get(f"{prefix}.choice.bias")
        self._router = store(weights[f"{prefix}.router.weight"], bias, table, PLAIN)
        self._router.prepare()
        self._route, self._get = table.primitive(api.ROUTE, moe), table.memory.get
        self._num = moe.num_experts
        self.shares: Floats = np.zeros((0, 0))
        self.sequence: Any = np.zeros(0, np.int64)
        self.lengths: tuple[int, ...] = ()

    def route(self, x: Floats, lengths: tuple[int, ...]) -> None:
        """Compute the shares [T, experts] of the tokens of a pass."""
        ids, scores = self._route(self._router.apply(x), self._choice)
        self.shares = np.zeros((len(x), self._num))
        np.put_along_axis(self.shares, np.asarray(ids), self._get(scores), axis=1)
        self.sequence, self.lengths = np.repeat(np.arange(len(lengths)), lengths), lengths


def _add_squares(mean: Mean, x: Floats) -> None:
    mean.add(np.square(x))


def _lengths(x: Floats, units: int) -> Floats:
    """Return the norm of each unit's part of the rows of x [T, units x n], [T, units]."""
    found: Floats = np.linalg.norm(x.reshape(len(x), units, -1).astype(np.float64), axis=-1)
    return found


def _readers(spec: ModelSpec) -> dict[str, str]:
    """Return the input of one matrix that reads a branch's norm, by the name of that norm."""
    known, found = set(input_names(spec)), dict[str, str]()
    shapes = {w.name: w.shape for w in spec.weights()}
    for name, axis in width_axes(spec).items():
        given = name.removesuffix(".weight") + INPUT
        if not name.startswith("layers.") or given not in known or axis != len(shapes[name]) - 1:
            continue
        layers, number, branch, *_ = name.split(".")
        found.setdefault(f"{layers}.{number}.{branch}_norm", given)
    return found


def stream_moment(
    spec: ModelSpec, weights: Mapping[str, Any], token_ids: Any, positions: Any, lengths: tuple[int, ...],
    table: OpsTable,
) -> Floats:  # fmt: skip
    """Return the second moment of the stream [hidden size, hidden size] before each layer and after the last, with
    every token scaled to norm 1.
    """
    total, count = np.zeros((spec.hidden_size,) * 2), 0

    def receive(name: str, x: Any) -> None:
        nonlocal total, count
        found = table.memory.get(x).astype(np.float64)
        units = found / np.maximum(np.linalg.norm(found, axis=1, keepdims=True), 1e-12)
        total, count = total + units.T @ units, count + len(units)

    capture = Capture(spec, [EMBED, *(f"layers.{i}" for i in range(len(spec.layers)))], receive)
    placed = {name: table.memory.put(np.asarray(x), "float32", "float32") for name, x in weights.items()}
    ids, at = (table.memory.integers(np.asarray(x)) for x in (token_ids, positions))
    Model(spec, placed, table, max(lengths)).forward(DenseStep(ids, at, lengths, table.memory), capture)
    return total / count
