"""Build modules from a ModelSpec. No code here depends on an architecture or on a tensor library."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np

from ridgeline.errors import CheckpointError
from ridgeline.nn.adapters import AdapterSlots
from ridgeline.nn.binding import How, bound, mixer_norm, mixer_weights
from ridgeline.nn.branches import Branch, OuterNorm, build_mlp
from ridgeline.nn.canvas import Conditioning, Soften
from ridgeline.nn.capture import Capture
from ridgeline.nn.embedded import Branch as EmbeddedBranch
from ridgeline.nn.embedded import EmbeddedInputs, embedded_branch
from ridgeline.nn.group import Group, Ranks
from ridgeline.nn.held import HeldWeights, WithConstants
from ridgeline.nn.mixers import build_mixer
from ridgeline.nn.rotations import Rotations
from ridgeline.nn.step import Step, Stream
from ridgeline.nn.terms import Terms, check_low_rank, stored_term
from ridgeline.nn.transform import TransformedHead
from ridgeline.ops import OpsTable, api
from ridgeline.ops.api import Array, Linear, QuantizedMatrix, Rotary, Weights
from ridgeline.ops.stages import Head, MLPBlock
from ridgeline.quant import store
from ridgeline.spec import AnyLayer, CanvasDiffusion, DeepNormLayer, Layer, ModelSpec, ParallelLayer, Rope, Weight
from ridgeline.spec.encoder import TYPE_TABLE
from ridgeline.spec.model import mlp_norm
from ridgeline.spec.per_layer import EMBEDDED_NORM, TABLE
from ridgeline.spec.quant import AS_STORED, FormatTable
from ridgeline.spec.storage import UNSCALED, KVScales


class Model:
    """A ModelSpec with its weights, on one device.

    Args:
        weights: every weight of `spec.weights()`, by name: floats, or codes (QuantizedMatrix, QuantizedStack). A
            layer's weights are read when the layer is built, so that a mapping that reads files holds no more than one
            layer beside packed matrices.
        max_model_len: longest context in tokens that will be served.
        formats: how matrices of floats are stored. Codes keep their own format.
        low_rank: matrices (down [r, in], up [out, r]) by the name of the weight to whose product up(down(x)) is added.
            Embeddings, experts and matrices that are not multiplied as one take none.
        capture: receives the inputs of matrices that it asks for, in every pass; see `nn.capture.input_names`.
        kv_scales: scales of keys and values in fp8 by layer; of other layers they are 1.
        group: the ranks that compute the model together, if `spec` is the part of one rank.
        adapters: room for the terms of adapters, which tokens choose by `step.adapters`.

    Raises:
        ValueError: for a low-rank term whose name or shape does not fit.
    """

    def __init__(
        self, spec: ModelSpec, weights: Mapping[str, Array], table: OpsTable, max_model_len: int,
        formats: FormatTable = AS_STORED, low_rank: Mapping[str, Terms] = MappingProxyType({}),
        capture: Capture | None = None, kv_scales: Mapping[int, KVScales] = MappingProxyType({}),
        group: Group | None = None, adapters: AdapterSlots | None = None,
    ) -> None:  # fmt: skip
        check_low_rank(spec, low_rank)
        self.group, self.adapters = group, adapters
        self._ranks = None if group is None else Ranks(spec, group, table)
        self._joined: Callable[[Array], Array] = self._ranks.joined if self._ranks else lambda logits: logits
        self.spec = spec
        self.kv_scales = kv_scales
        self.max_model_len = max_model_len
        self.weights = weights
        self.formats = formats
        self._held = weights = HeldWeights(WithConstants(weights, spec, table.memory))
        self._table_rows = table.primitive(api.EMBEDDING)
        self._coded_rows = table.primitive(api.QUANTIZED_ROWS)
        self._scale = table.primitive(api.SCALE)
        self._add = table.primitive(api.ADD)
        self.rotaries = Rotations(spec.ropes(), spec.regimes(max_model_len), max_model_len, table)
        self.frequency_tables = self.rotaries.tables
        embedding = weights["embed.weight"]
        self._positions: Any = weights["position_embed.weight"] if spec.num_position_embeddings else None
        self._types: Any = weights.get(TYPE_TABLE)
        self._memory = table.memory
        how = How(table, formats, low_rank, capture, kv_scales, self._ranks, adapters)
        self._capture = capture
        # The largest matrix is packed first: its floats are released before others are read.
        self._head = None if spec.encoder else _head(spec, weights, embedding, how)
        self._lookup = self._lookup_in(embedding)
        self._embedded = self._embedded_inputs(weights, how) if spec.layer_embeddings else None
        self._conditioning: Conditioning | None = None
        if isinstance(spec.diffusion, CanvasDiffusion):
            own = {name: weights[name] for name in weights if name.startswith("conditioning")}
            self._conditioning = Conditioning(spec.diffusion, spec.hidden_size, bound(own, "conditioning", how), table)
            self.soften = Soften(spec, self.lookup, table)
        self._embed_norm = OuterNorm(spec.embed_norm, "embed_norm", weights, table)
        self._final_norm = OuterNorm(spec.norm, "norm", weights, table)
        self._final_scale = residual_scale(spec.layers[-1])
        self._blocks = self._layers(lambda: _blocks(spec, weights, how))

    def _layers(self, build: Callable[[], Iterator[_Block | _DeepNormBlock]]) -> Iterable[_Block | _DeepNormBlock]:
        """Return the layers that a forward pass runs through."""
        return list(build())

    def __call__(self, step: Step, rows: Array | None = None) -> Array:
        """Return logits [n, vocabulary] of the given rows of the step's T tokens (None: all of them), float32."""
        return self.logits(self.forward(step), rows)

    def forward(self, step: Step, capture: Capture | None = None, aux: Sequence[int] = ()) -> Stream:
        """Run the step's T tokens through all layers and write their state. Return the stream after the last layer.

        Args:
            capture: receives the outputs that it asks for; see `nn.capture.output_names`.
            aux: ids of layers, checked by `spec.heads.check_aux`. `aux` of the result has the residual stream that
                enters each of these layers, whose number is vLLM's id: 0 is the embedding, i the output of layer
                i - 1, and the number of layers the output of the last one, before the last norm.

        Raises:
            ValueError: if `capture` asks for inputs of matrices and is not the one that the model was built with.
        """
        if capture is not None and capture.has_inputs and capture is not self._capture:
            raise ValueError("inputs of matrices are captured only by a model that is built for it: Model(capture=...)")
        if self.adapters is not None:
            self.adapters.slots = step.adapters
        stream = self.begin(step)
        if capture is not None:
            capture.put("embed", lambda: stream.residual)
        kept = {0: stream.residual} if 0 in aux else {}
        rotaries = self.rotaries(step)
        for i, block in enumerate(self._blocks):
            run = block if capture is None else partial(block, capture=capture)
            stream = self.run_block(run, stream, step, rotaries)
            whole = partial(self._whole, stream, residual_scale(self.spec.layers[i]))
            if capture is not None:
                capture.put(f"layers.{i}", whole)
            if i + 1 in aux:
                kept[i + 1] = whole()
        last = Stream(stream.residual, stream.delta, aux=tuple(kept[i] for i in aux))
        if capture is not None:
            capture.put("norm", lambda: self.hidden(last))
        return last

    def run_apart(self, step: Step, inputs: Iterable[Array]) -> Iterator[Array]:
        """Run each layer on a stream of its own, [T, hidden_size], and yield the stream after the layer.

        Keys and values that several layers share are those of the layer that computes them.
        """
        rotaries, stream = self.rotaries(step), self.begin(step)
        for block, layer, x in zip(self._blocks, self.spec.layers, inputs, strict=True):
            stream = self.run_block(block, stream._replace(residual=x, delta=None), step, rotaries)
            yield self._whole(stream, residual_scale(layer))

    def _whole(self, stream: Stream, scale: float) -> Array:
        """Return the residual stream with its delta added. scale: factor on the delta."""
        return stream.residual if stream.delta is None else self._add(stream.residual, stream.delta, scale)

    def constants(self) -> list[Array]:
        """Return all arrays that a forward pass reads besides its step, except those that kernels own."""
        own = self.adapters.arrays() if self.adapters else ()
        return [*self._held.alive(), *self.rotaries.constants(), *own]

    @contextmanager
    def without_layers(self) -> Iterator[None]:
        """Make forward passes consist of the embedding alone, for measurements."""
        blocks, self._blocks = self._blocks, ()
        try:
            yield
        finally:
            self._blocks = blocks

    def run_block(
        self, block: Callable[..., Stream], stream: Stream, step: Step, rotaries: Mapping[Rope, Rotary]
    ) -> Stream:
        """Run one layer. Training overrides this method."""
        return block(stream, step, rotaries)

    def logits(self, stream: Stream, rows: Array | None = None) -> Array:
        """Return logits [n, vocabulary] of the given rows of a stream (None: all of them), float32."""
        return self._joined(self._output()(stream.residual, stream.delta, rows))

    def hidden(self, stream: Stream) -> Array:
        """Return the stream after the last norm, [T, hidden_size], which is the input of the head."""
        return self._final_norm(self._whole(stream, self._final_scale))

    def project(self, x: Array) -> Array:
        """Return logits [n, vocabulary] of rows [n, hidden_size] that are normalized already, float32."""
        return self._joined(self._output().project(x))

    def _output(self) -> api.HeadStage:
        """Return the output head. Raises RequestError for an encoder, which has none."""
        self.spec.require_logits("computing logits")
        assert self._head is not None
        return self._head

    def begin(self, step: Step) -> Stream:
        """Return the stream before the first layer, with the embeddings that layers have of their own."""
        x = self.embed(step)
        if step.signal is not None and self._conditioning is not None:
            x = self._conditioning(x, step.signal)
        return Stream(x, None, embedded=self._embedded(x, step.token_ids) if self._embedded else None)

    def embed(self, step: Step) -> Array:
        """Return the residual stream before the first layer."""
        x = self.lookup(step.token_ids)
        if self.spec.embedding_scale != 1.0:
            x = self._scale(x, self.spec.embedding_scale)
        if self._positions is not None:
            rows = self._positions[self.spec.position_offset :]
            x = self._add(x, self._table_rows(rows, step.positions), 1.0)
        if self._types is not None:
            none = np.zeros(step.positions.shape[0], np.int64)
            types = self._memory.integers(none) if step.token_types is None else step.token_types
            x = self._add(x, self._table_rows(self._types, types), 1.0)
        return self._embed_norm(x)

    def lookup(self, ids: Array) -> Array:
        """Return rows [n, hidden_size] of the embedding, without the model's scale and learned positions."""
        return self._lookup(ids)

    def _lookup_in(self, embedding: Array) -> Callable[[Array], Array]:
        """Return the function that looks rows up. Rows of a tied matrix of codes are those of the head, if it has them,
        so that the matrix is in memory only once.
        """
        rows: Callable[[Array], Array] = partial(self._table_rows, embedding)
        if isinstance(embedding, QuantizedMatrix):
            of_head = self._head.rows if self._head and self.spec.tie_word_embeddings else None
            rows = of_head or partial(self._coded_rows, embedding)
        return rows if self._ranks is None else self._ranks.rows(rows)

    def _embedded_inputs(self, weights: Mapping[str, Array], how: How) -> EmbeddedInputs:
        table, name = weights[TABLE], "layer_embed_project.weight"
        project = _linear(name, weights[name], how)
        if isinstance(table, QuantizedMatrix):
            rows = partial(self._coded_rows, table)
        else:
            rows = partial(self._table_rows, table)
        return EmbeddedInputs(self.spec, project, rows, how.table)


class PassingModel(Model):
    """A Model for few forward passes: each layer is built when a pass reaches it, and released after it."""

    def _layers(self, build: Callable[[], Iterator[_Block | _DeepNormBlock]]) -> Iterable[_Block | _DeepNormBlock]:
        return _Anew(build)


class _Anew:
    """Layers that are built in each iteration."""

    def __init__(self, build: Callable[[], Iterator[_Block | _DeepNormBlock]]) -> None:
        self._build = build

    def __iter__(self) -> Iterator[_Block | _DeepNormBlock]:
        return self._build()


class _Block:
    """One layer."""

    def __init__(
        self, index: int, spec: ModelSpec, weights: Mapping[str, Array], how: How, previous_scale: float
    ) -> None:
        layer, table = spec.layers[index], how.table
        assert not isinstance(layer, DeepNormLayer)
        self._rope = layer.mixer.rope if layer.mixer else None
        self._parallel = isinstance(layer, ParallelLayer)
        self._name = f"layers.{index}"
        mixer, kv_scales = mixer_weights(spec, index, weights, how), how.kv_scales.get(index, UNSCALED)
        self._mixer = build_mixer(spec, index, mixer, table, previous_scale, kv_scales) if layer.mixer else None
        self._before_scale = residual_scale(spec.layers[index - 1]) if spec.is_beside(index) else None
        self._is_held = spec.is_beside(index + 1)
        scale = mixer_scale(layer) if layer.mixer else previous_scale
        self._mlp: Branch | None = None
        self._aside: Branch | None = None
        if layer.mlp:
            norm = "mixer_norm" if isinstance(layer, ParallelLayer) and layer.one_norm else "mlp_norm"
            mlp = bound(weights, f"{self._name}.mlp", how, f"{self._name}.{norm}")
            self._mlp, self._aside = build_mlp(MLPBlock(layer.mlp, mlp_norm(layer), scale), mlp, table)
        post, last = layer.post_norms if isinstance(layer, Layer) else (None, None)
        self._mixer_post = OuterNorm(post, f"{self._name}.mixer_post_norm", weights, table)
        self._mlp_post = OuterNorm(last, f"{self._name}.mlp_post_norm", weights, table)
        self._add, self._times = table.primitive(api.ADD), table.primitive(api.MULTIPLY)
        self._total = how.total
        self._scale, self._out_scale = residual_scale(layer), weights.get(f"{self._name}.scale.weight")
        self._canvas_scale = weights.get(f"{self._name}.canvas_scale.weight")
        self._embedded: EmbeddedBranch | None = None
        if spec.embedded(index):
            own, norm_weight = bound(weights, f"{self._name}.embedded", how), weights[EMBEDDED_NORM]
            self._embedded = embedded_branch(spec, index, own, norm_weight, table)
        self._embedded_post = OuterNorm(post, f"{self._name}.embedded_post_norm", weights, table)

    def __call__(
        self, stream: Stream, step: Step, rotaries: Mapping[Rope, Rotary], capture: Capture | None = None
    ) -> Stream:
        residual, delta, shared, aside = stream.residual, stream.delta, stream.shared, stream.aside
        if self._mixer:
            rotary = rotaries[self._rope] if self._rope else None
            residual, delta, shared = self._mixer(stream, rotary, step)
            if stream.held is not None and self._before_scale is not None:
                residual = self._add(residual, stream.held, self._before_scale)
            if self._mlp and self._parallel:
                _capture_branch(capture, f"{self._name}.mixer", delta)
                _, other = self._mlp(residual, None)
                _capture_branch(capture, f"{self._name}.mlp", other)
                delta = self._total(self._add(delta, other, 1.0))
                return stream._replace(residual=residual, delta=delta, shared=shared)
            delta = self._total(delta)
            _capture_branch(capture, f"{self._name}.mixer", delta)
            delta = self._mixer_post(delta)
        if self._is_held:
            return stream._replace(residual=residual, delta=None, shared=shared, held=delta)
        if self._mlp:
            residual, delta = self._mlp(residual, delta)
            delta = self._total(delta)
            _capture_branch(capture, f"{self._name}.mlp", delta)
            delta = self._mlp_post(delta)
            delta = delta if aside is None else self._add(delta, aside, 1.0)
            aside = self._total(self._aside(residual, None)[1]) if self._aside else None
        if self._embedded and stream.embedded is not None:
            residual, delta = self._sum(residual, delta), None
            delta = self._embedded_post(self._embedded(residual, stream.embedded))
        factor = self._out_scale if step.signal is None else self._canvas_scale
        if factor is not None:
            residual, delta = self._times(self._sum(residual, delta), factor), None
        return stream._replace(residual=residual, delta=delta, shared=shared, aside=aside, held=None)

    def _sum(self, residual: Array, delta: Array | None) -> Array:
        return residual if delta is None else self._add(residual, delta, self._scale)


class _DeepNormBlock:
    """One layer whose residual is the stream after a norm."""

    def __init__(
        self, index: int, spec: ModelSpec, weights: Mapping[str, Array], how: How, previous_scale: float
    ) -> None:
        layer, table = spec.layers[index], how.table
        assert isinstance(layer, DeepNormLayer)
        self._layer, self._previous_scale = layer, previous_scale
        self._name = f"layers.{index}"
        mixer = mixer_weights(spec, index, weights, how)
        self._total = how.total
        self._mixer = build_mixer(spec, index, mixer, table, 1.0, how.kv_scales.get(index, UNSCALED))
        mlp = bound(weights, f"{self._name}.mlp", how)
        self._mlp = table.stage(api.MLP_BLOCK, MLPBlock(layer.mlp, None, 1.0), mlp)
        self._mixer_norm = OuterNorm(layer.pre_norm, f"{self._name}.mixer_norm", weights, table)
        self._mlp_norm = OuterNorm(layer.pre_norm, f"{self._name}.mlp_norm", weights, table)
        self._add, self._times = table.primitive(api.ADD), table.primitive(api.SCALE)

    def __call__(
        self, stream: Stream, step: Step, rotaries: Mapping[Rope, Rotary], capture: Capture | None = None
    ) -> Stream:
        layer, rope = self._layer, self._layer.mixer.rope
        x = stream.residual
        if stream.delta is not None:
            x = self._add(x, stream.delta, self._previous_scale)
        x = self._mixer_norm(x)
        _, delta, shared = self._mixer(Stream(x, None, stream.shared), rotaries[rope] if rope else None, step)
        delta = self._total(delta)
        _capture_branch(capture, f"{self._name}.mixer", delta)
        x = self._mlp_norm(self._add(self._times(x, layer.mixer_alpha), delta, layer.mixer_beta))
        _, delta = self._mlp(x, None)
        delta = self._total(delta)
        _capture_branch(capture, f"{self._name}.mlp", delta)
        return stream._replace(residual=self._times(x, layer.mlp_alpha), delta=delta, shared=shared)


def _capture_branch(capture: Capture | None, name: str, output: Array) -> None:
    if capture is not None:
        capture.put(name, lambda: output)


def residual_scale(layer: AnyLayer) -> float:
    """Return the factor on the output of a layer's last branch where it is added to the stream."""
    if isinstance(layer, DeepNormLayer):
        return layer.mlp_beta
    if isinstance(layer, ParallelLayer):
        return 1.0
    return layer.residual_scale if layer.mlp_scale is None else layer.mlp_scale


def mixer_scale(layer: AnyLayer) -> float:
    """Return the factor on the output of a layer's mixer where it is added to the stream."""
    return layer.residual_scale if isinstance(layer, Layer) else residual_scale(layer)


def build_layer(
    index: int, spec: ModelSpec, weights: Mapping[str, Array], how: How, previous_scale: float
) -> _Block | _DeepNormBlock:
    """Return layer `index` of a spec. weights: its weights, by name. previous_scale: see `residual_scale`."""
    kind = _DeepNormBlock if isinstance(spec.layers[index], DeepNormLayer) else _Block
    return kind(index, spec, weights, how, previous_scale)


def _blocks(spec: ModelSpec, weights: Mapping[str, Array], how: How) -> Iterator[_Block | _DeepNormBlock]:
    by_layer: list[list[str]] = [[] for _ in spec.layers]
    for name in weights:
        if name.startswith("layers."):
            by_layer[int(name.split(".", 2)[1])].append(name)
    scale = 1.0
    for i, layer in enumerate(spec.layers):
        names = [*by_layer[i], *((EMBEDDED_NORM,) if spec.embedded(i) else ())]
        if spec.is_beside(i):
            names += [name for name in by_layer[i - 1] if name.startswith(f"{mixer_norm(spec, i)}.")]
        with _named(f"layer {i}"):
            block = build_layer(i, spec, {name: weights[name] for name in names}, how, scale)
        yield block
        scale = residual_scale(layer)


def _linear(name: str, matrix: Array, how: How, bias: Array | None = None) -> Linear:
    """Return a matrix that is not of a layer."""
    own, term = how.formats.of(Weight(name, matrix.shape)), stored_term(how.low_rank.get(name), how.table)
    return store(matrix, bias, how.table, own, term)


def _head(spec: ModelSpec, weights: Mapping[str, Array], embedding: Array, how: How) -> api.HeadStage:
    case = Head(spec.norm, residual_scale(spec.layers[-1]), spec.logit_scale, spec.logit_softcap)
    matrix = embedding if spec.tie_word_embeddings else weights["head.weight"]
    arrays = {f"norm.{kind}": weights[f"norm.{kind}"] for kind in ("weight", "bias") if f"norm.{kind}" in weights}
    bias = weights["head.bias"] if spec.head_bias else None
    linears = {"head": _linear("head.weight", matrix, how, bias)}
    with _named("the head"):
        stage = how.table.stage(api.HEAD, case, Weights(linears, arrays))
        if spec.head_transform is None:
            return stage
        dense = _linear("head_dense.weight", weights["head_dense.weight"], how, weights.get("head_dense.bias"))
        return TransformedHead(spec, stage, dense, weights, how.table, case.residual_scale)


@contextmanager
def _named(part: str) -> Iterator[None]:
    """Name the part of the model in the error for a matrix that cannot be stored."""
    try:
        yield
    except ValueError as e:
        raise CheckpointError(f"{part}: {e}") from None
