"""Modules built from a ModelSpec. Nothing here knows an architecture, and nothing here knows a tensor library."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from ridgeline.errors import CheckpointError
from ridgeline.nn.mixers import build_mixer
from ridgeline.nn.rotary import FrequencyTables, frequencies
from ridgeline.nn.step import Step, Stream
from ridgeline.ops import OpsTable, api
from ridgeline.ops.api import Array, Linear, Rotary, Weights
from ridgeline.ops.stages import Head, MLPBlock
from ridgeline.quant import store
from ridgeline.spec import AnyLayer, DeepNormLayer, ModelSpec, Norm, ParallelLayer, Rope, Weight
from ridgeline.spec.quant import PLAIN, Format


class Model:
    """A ModelSpec with its weights, on one device.

    weights: every weight of `spec.weights()`, by name; each is asked for when its layer is built, so that a mapping
    which reads them then has no more than a layer's in memory beside what kernels made of others. max_model_len: the
    longest context in tokens that will be served. format: of matrices.
    """

    def __init__(
        self, spec: ModelSpec, weights: Mapping[str, Array], table: OpsTable, max_model_len: int, format: Format = PLAIN
    ) -> None:
        self.spec = spec
        self.max_model_len = max_model_len
        self.weights = weights
        self.format = format
        self._held = weights = _Held(weights)
        self._table_rows = table.primitive(api.EMBEDDING)
        self._scale = table.primitive(api.SCALE)
        self._add = table.primitive(api.ADD)
        self._rotary = table.primitive(api.ROTARY)
        # None: every rotation follows from the position alone.
        regimes = spec.regimes(max_model_len)
        self.frequency_tables = FrequencyTables(regimes) if regimes.breaks else None
        self._frequencies: dict[Rope, tuple[Array, float]] = {}  # [dim / 2], or a row for each regime
        for rope in spec.ropes():
            by_length = self.frequency_tables if rope.follows_length else None
            inverse, factor = by_length.table(rope) if by_length else frequencies(rope, max_model_len)
            self._frequencies[rope] = table.memory.put(inverse, "float32", "float32"), factor
        self._embedding = weights["embed.weight"]
        self._positions = weights["position_embed.weight"] if spec.num_position_embeddings else None
        # The largest matrix comes first: what it is made of is let go before the others come.
        self._head = _head(spec, weights, self._embedding, table, format)
        self._final_norm = _OuterNorm(spec.norm, "norm", weights, table)
        self._final_scale = residual_scale(spec.layers[-1])
        self._blocks = self._layers(lambda: _blocks(spec, weights, table, format))

    def _layers(self, build: Callable[[], Iterator[_Block | _DeepNormBlock]]) -> Iterable[_Block | _DeepNormBlock]:
        """What a pass runs through."""
        return list(build())

    def __call__(self, step: Step, rows: Array | None = None) -> Array:
        """Logits [n, vocabulary] of the given rows of the step's T tokens (None: all of them), float32."""
        return self.logits(self.forward(step), rows)

    def forward(self, step: Step) -> Stream:
        """What the layers make of the step's T tokens; the state is written."""
        stream = Stream(self.embed(step), None)
        rotaries = self._rotaries(step)
        for block in self._blocks:
            stream = self.run_block(block, stream, step, rotaries)
        return Stream(stream.residual, stream.delta)

    def _rotaries(self, step: Step) -> Mapping[Rope, Rotary]:
        """The rotation of each of the step's tokens, for each kind of rotation."""
        if self.frequency_tables is None:
            return {rope: self._rotary(step.positions, *f) for rope, f in self._frequencies.items()}
        rows = step.frequency_rows(self.frequency_tables)
        return {
            rope: self._rotary(
                step.positions, self._table_rows(inverse, rows) if rope.follows_length else inverse, factor
            )
            for rope, (inverse, factor) in self._frequencies.items()
        }

    def constants(self) -> list[Array]:
        """All arrays that a forward pass reads besides its step, but for those that kernels keep for themselves."""
        return [
            *self._held.alive(),
            *(inverse for inverse, _ in self._frequencies.values()),
        ]

    @contextmanager
    def without_layers(self) -> Iterator[None]:
        """For measuring: meanwhile a pass is the embedding alone."""
        blocks, self._blocks = self._blocks, ()
        try:
            yield
        finally:
            self._blocks = blocks

    def run_block(
        self, block: Callable[..., Stream], stream: Stream, step: Step, rotaries: Mapping[Rope, Rotary]
    ) -> Stream:
        """One layer; training wraps it."""
        return block(stream, step, rotaries)

    def logits(self, stream: Stream, rows: Array | None = None) -> Array:
        """Logits [n, vocabulary] of the given rows of a stream (None: all of them), float32."""
        return self._head(stream.residual, stream.delta, rows)

    def hidden(self, stream: Stream) -> Array:
        """What the head multiplies [T, hidden_size]: the stream after the last norm."""
        x = stream.residual
        return self._final_norm(x if stream.delta is None else self._add(x, stream.delta, self._final_scale))

    def embed(self, step: Step) -> Array:
        """The residual stream before the first layer."""
        x = self._table_rows(self._embedding, step.token_ids)
        if self.spec.embedding_scale != 1.0:
            x = self._scale(x, self.spec.embedding_scale)
        if self._positions is not None:
            x = self._add(x, self._table_rows(self._positions, step.positions), 1.0)
        return x


class _Held(Mapping[str, Array]):
    """Weights, and which of those that were read somebody still holds: asking again might read them from a file."""

    def __init__(self, weights: Mapping[str, Array]) -> None:
        self._weights = weights
        self._found: dict[str, weakref.ref[Any]] = {}

    def __getitem__(self, name: str) -> Array:
        found = self._weights[name]
        self._found[name] = weakref.ref(found)
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)

    def alive(self) -> list[Array]:
        return [array for array in (ref() for ref in self._found.values()) if array is not None]


class PassingModel(Model):
    """A Model for a pass or two: a layer is built when a pass comes to it, and let go when it has gone through."""

    def _layers(self, build: Callable[[], Iterator[_Block | _DeepNormBlock]]) -> Iterable[_Block | _DeepNormBlock]:
        return _Anew(build)


class _Anew:
    """Layers that are built each time."""

    def __init__(self, build: Callable[[], Iterator[_Block | _DeepNormBlock]]) -> None:
        self._build = build

    def __iter__(self) -> Iterator[_Block | _DeepNormBlock]:
        return self._build()


class _Block:
    """One layer."""

    def __init__(
        self, index: int, spec: ModelSpec, weights: Mapping[str, Array], table: OpsTable, format: Format,
        previous_scale: float,
    ) -> None:  # fmt: skip
        layer = spec.layers[index]
        assert not isinstance(layer, DeepNormLayer)
        self._rope = layer.mixer.rope if layer.mixer else None
        self._parallel = isinstance(layer, ParallelLayer)
        at = f"layers.{index}."
        mixer = bind(weights, table, f"{at}mixer", f"{at}mixer_norm", format)
        self._mixer = build_mixer(spec, index, mixer, table, previous_scale) if layer.mixer else None
        scale = residual_scale(layer) if layer.mixer else previous_scale
        self._mlp: Callable[..., tuple[Array, Array]] | None = None
        if layer.mlp:
            mlp = bind(weights, table, f"{at}mlp", f"{at}mlp_norm", format)
            self._mlp = table.stage(api.MLP_BLOCK, MLPBlock(layer.mlp, layer.pre_norm, scale), mlp)
        post = None if isinstance(layer, ParallelLayer) else layer.post_norm
        self._mixer_post = _OuterNorm(post, f"{at}mixer_post_norm", weights, table)
        self._mlp_post = _OuterNorm(post, f"{at}mlp_post_norm", weights, table)
        self._add = table.primitive(api.ADD)

    def __call__(self, stream: Stream, step: Step, rotaries: Mapping[Rope, Rotary]) -> Stream:
        residual, delta, shared = stream
        if self._mixer:
            rotary = rotaries[self._rope] if self._rope else None
            residual, delta, shared = self._mixer(stream, rotary, step)
            delta = self._mixer_post(delta)
            if self._mlp and self._parallel:
                _, other = self._mlp(residual, None)
                return Stream(residual, self._add(delta, other, 1.0), shared)
        if self._mlp:
            residual, delta = self._mlp(residual, delta)
            delta = self._mlp_post(delta)
        return Stream(residual, delta, shared)


class _DeepNormBlock:
    """One layer whose residual is the normed stream."""

    def __init__(
        self, index: int, spec: ModelSpec, weights: Mapping[str, Array], table: OpsTable, format: Format,
        previous_scale: float,
    ) -> None:  # fmt: skip
        layer = spec.layers[index]
        assert isinstance(layer, DeepNormLayer)
        self._layer, self._previous_scale = layer, previous_scale
        at = f"layers.{index}."
        mixer = bind(weights, table, f"{at}mixer", f"{at}mixer_norm", format)
        self._mixer = build_mixer(spec, index, mixer, table, 1.0)
        mlp = bind(weights, table, f"{at}mlp", f"{at}mlp_norm", format)
        self._mlp = table.stage(api.MLP_BLOCK, MLPBlock(layer.mlp, None, 1.0), mlp)
        self._mixer_norm = _OuterNorm(layer.pre_norm, f"{at}mixer_norm", weights, table)
        self._mlp_norm = _OuterNorm(layer.pre_norm, f"{at}mlp_norm", weights, table)
        self._add, self._times = table.primitive(api.ADD), table.primitive(api.SCALE)

    def __call__(self, stream: Stream, step: Step, rotaries: Mapping[Rope, Rotary]) -> Stream:
        layer, rope = self._layer, self._layer.mixer.rope
        x = stream.residual
        if stream.delta is not None:
            x = self._add(x, stream.delta, self._previous_scale)
        x = self._mixer_norm(x)
        _, delta, shared = self._mixer(Stream(x, None, stream.shared), rotaries[rope] if rope else None, step)
        x = self._mlp_norm(self._add(self._times(x, layer.mixer_alpha), delta, layer.mixer_beta))
        _, delta = self._mlp(x, None)
        return Stream(self._times(x, layer.mlp_alpha), delta, shared)


class _OuterNorm:
    """A norm that is no part of a stage, where the layer has one: after a branch, or of the stream itself."""

    def __init__(self, norm: Norm | None, name: str, weights: Mapping[str, Array], table: OpsTable) -> None:
        self._kernel = table.primitive(api.NORM, norm) if norm else None
        self._weight, self._bias = weights.get(f"{name}.weight"), weights.get(f"{name}.bias")

    def __call__(self, x: Array) -> Array:
        return x if self._kernel is None or self._weight is None else self._kernel(x, self._weight, self._bias)


def residual_scale(layer: AnyLayer) -> float:
    """The factor on what a layer's last branch adds."""
    if isinstance(layer, DeepNormLayer):
        return layer.mlp_beta
    return 1.0 if isinstance(layer, ParallelLayer) else layer.residual_scale


def bind(weights: Mapping[str, Array], table: OpsTable, prefix: str, norm: str, format: Format = PLAIN) -> Weights:
    """The weights of one stage: matrices under `prefix` as Linear in a format, where a format may hold them; everything
    else as arrays; its norm as "norm"."""
    linears: dict[str, Linear] = {}
    experts: dict[str, list[Linear]] = {}
    arrays: dict[str, Array] = {}
    for name, array in weights.items():
        if name.startswith(f"{norm}."):
            arrays[f"norm.{name.removeprefix(f'{norm}.')}"] = array
        elif name.startswith(f"{prefix}."):
            module, _, kind = name.removeprefix(f"{prefix}.").rpartition(".")
            bias = weights.get(f"{prefix}.{module}.bias")
            own = format if Weight(name, array.shape).may_be_rounded else PLAIN
            if kind == "weight" and len(array.shape) == 2:
                linears[module] = store(array, bias, table, own)
            elif kind == "weight" and module.startswith("experts."):
                stack: Any = array, bias
                experts[module.removeprefix("experts.")] = [
                    store(stack[0][e], None if bias is None else stack[1][e], table, own) for e in range(array.shape[0])
                ]
            else:
                arrays[f"{module}.{kind}" if module else kind] = array
    return Weights(linears, arrays, experts)


def _blocks(
    spec: ModelSpec, weights: Mapping[str, Array], table: OpsTable, format: Format
) -> Iterator[_Block | _DeepNormBlock]:
    by_layer: list[list[str]] = [[] for _ in spec.layers]
    for name in weights:
        if name.startswith("layers."):
            by_layer[int(name.split(".", 2)[1])].append(name)
    scale = 1.0
    for i, layer in enumerate(spec.layers):
        kind = _DeepNormBlock if isinstance(layer, DeepNormLayer) else _Block
        with _named(f"layer {i}"):
            block = kind(i, spec, {name: weights[name] for name in by_layer[i]}, table, format, scale)
        yield block
        scale = residual_scale(layer)


def _head(
    spec: ModelSpec, weights: Mapping[str, Array], embedding: Array, table: OpsTable, format: Format
) -> api.HeadStage:
    case = Head(spec.norm, residual_scale(spec.layers[-1]), spec.logit_scale, spec.logit_softcap)
    matrix = embedding if spec.tie_word_embeddings else weights["head.weight"]
    arrays = {f"norm.{kind}": weights[f"norm.{kind}"] for kind in ("weight", "bias") if f"norm.{kind}" in weights}
    linears = {"head": store(matrix, None, table, format)}
    with _named("the head"):
        return table.stage(api.HEAD, case, Weights(linears, arrays))


@contextmanager
def _named(part: str) -> Iterator[None]:
    """Say of which part of a model a matrix is that cannot be stored."""
    try:
        yield
    except ValueError as e:
        raise CheckpointError(f"{part}: {e}") from None
