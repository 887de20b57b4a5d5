"""EAGLE heads: one decoder layer that continues the target's hidden states (arXiv:2401.15077, 2503.01840).

Row i of a step has position i, the feature of position i, and the token of position i + 1. Its logits propose the token
of position i + 2, and its `feature` belongs to position i + 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce

from ridgeline.nn.heads.parts import Parts
from ridgeline.nn.mixers import build_attention
from ridgeline.nn.model import Model
from ridgeline.nn.rotations import Rotations
from ridgeline.nn.step import Step, Stream
from ridgeline.ops import api
from ridgeline.ops.api import Array
from ridgeline.ops.stages import MLPBlock
from ridgeline.spec.heads import LAYER, Eagle3Spec, EagleBase, EagleSpec
from ridgeline.spec.storage import UNSCALED


class _Layer:
    """The decoder layer of an EAGLE head, whose attention reads another array than its residual stream."""

    def __init__(self, spec: EagleBase, parts: Parts, target: Model, max_model_len: int) -> None:
        self._embedding = parts.weights["embed.weight"] if spec.own_embedding else None
        self._rows, self._target = parts.table.primitive(api.EMBEDDING), target
        self.rotations = Rotations(spec.ropes(), spec.regimes(max_model_len), max_model_len, parts.table)
        self._rope = spec.attention.rope
        mixer = parts.stage(f"{LAYER}.mixer")
        self._mixer = build_attention(0, spec.attention, None, mixer, parts.table, 1.0, UNSCALED, False)
        mlp = parts.stage(f"{LAYER}.mlp", f"{LAYER}.mlp_norm")
        self._mlp = parts.table.stage(api.MLP_BLOCK, MLPBlock(spec.mlp, spec.norm, 1.0), mlp)

    def embed(self, ids: Array) -> Array:
        """Return the embeddings [T, hidden_size] of tokens, without the target's scale."""
        return self._target.lookup(ids) if self._embedding is None else self._rows(self._embedding, ids)

    def __call__(self, x: Array, residual: Array, step: Step) -> Stream:
        """Run the layer. x: the input of q, k and v. residual: the stream [T, hidden_size] to which its results are
        added.
        """
        rotaries = self.rotations(step)
        _, delta, _ = self._mixer(Stream(x, None), rotaries[self._rope] if self._rope else None, step)
        return Stream(*self._mlp(residual, delta))


class EagleHead:
    """A head of EAGLE-1 or EAGLE-2."""

    def __init__(self, spec: EagleSpec, parts: Parts, target: Model, max_model_len: int) -> None:
        self.spec, self.max_model_len, self._parts, self._target = spec, max_model_len, parts, target
        self._layer = _Layer(spec, parts, target, max_model_len)
        self._fc = parts.product("fc")
        self._join, self._add = parts.table.primitive(api.JOIN), parts.table.primitive(api.ADD)
        self.frequency_tables = self._layer.rotations.tables
        self.to_target: Callable[[Array], Array] = parts.to_target
        self.vocabulary = parts.vocabulary

    def fuse(self, streams: Sequence[Array]) -> Array:
        """Return the features [T, hidden_size] of the target's streams: the only one, `Model.hidden`, itself."""
        (feature,) = streams
        return feature

    def forward(self, step: Step, features: Array) -> Stream:
        """Run T rows and write their keys and values. step.token_ids: the tokens after the features' positions.

        features: [T, hidden_size], as `fuse` or `feature` returns them.
        """
        x = self._fc(self._join(self._layer.embed(step.token_ids), features))
        return self._layer(x, x, step)

    def feature(self, stream: Stream) -> Array:
        """Return the features [T, hidden_size] for the rows of the next draft step."""
        return stream.residual if stream.delta is None else self._add(stream.residual, stream.delta, 1.0)

    def logits(self, features: Array) -> Array:
        """Return the logits [n, draft_vocab_size] of rows of `feature`, [n, hidden_size], float32."""
        return self._target.project(features)

    def constants(self) -> list[Array]:
        """Return all arrays that a step reads besides its inputs, except those that kernels own and the target's."""
        return [*self._parts.constants(), *self._layer.rotations.constants()]


class Eagle3Head:
    """A head of EAGLE-3. Its methods have the same meaning as those of EagleHead."""

    def __init__(self, spec: Eagle3Spec, parts: Parts, target: Model, max_model_len: int) -> None:
        self.spec, self.max_model_len, self._parts = spec, max_model_len, parts
        self._layer = _Layer(spec, parts, target, max_model_len)
        self._fc = parts.product("fc")
        self._join, self._add = parts.table.primitive(api.JOIN), parts.table.primitive(api.ADD)
        self._input_norm = parts.norm(spec.norm, "input_norm") if spec.norm_before_fc else None
        self._fc_norms = [parts.norm(spec.norm, f"fc_norm.{i}") for i in range(spec.num_aux if spec.fc_norm else 0)]
        self._embedding_norm = parts.norm(spec.norm, f"{LAYER}.mixer_norm")
        self._hidden_norm = parts.norm(spec.norm, f"{LAYER}.hidden_norm")
        self._last_norm = parts.norm(spec.norm, "norm")
        self._head = parts.head("head", spec.norm)
        self.frequency_tables = self._layer.rotations.tables
        self.to_target: Callable[[Array], Array] = parts.to_target
        self.vocabulary = parts.vocabulary

    def fuse(self, streams: Sequence[Array]) -> Array:
        """Return the features [T, hidden_size] of the target's streams [T, target's width], in the order of its ids."""
        if self._fc_norms:
            streams = [norm(x, w, None) for (norm, w), x in zip(self._fc_norms, streams, strict=True)]
        joined = reduce(self._join, streams)
        if self._input_norm:
            norm, weight = self._input_norm
            joined = norm(joined, weight, None)
        return self._fc(joined)

    def forward(self, step: Step, features: Array) -> Stream:
        """Run T rows and write their keys and values. step.token_ids: the tokens after the features' positions.

        features: [T, hidden_size], as `fuse` or `feature` returns them.
        """
        (on_embedding, a), (on_hidden, b) = self._embedding_norm, self._hidden_norm
        hidden = on_hidden(features, b, None)
        x = self._join(on_embedding(self._layer.embed(step.token_ids), a, None), hidden)
        return self._layer(x, hidden if self.spec.norm_before_residual else features, step)

    def feature(self, stream: Stream) -> Array:
        """Return the features [T, hidden_size] for the rows of the next draft step."""
        whole = stream.residual if stream.delta is None else self._add(stream.residual, stream.delta, 1.0)
        if not self.spec.norm_output:
            return whole
        norm, weight = self._last_norm
        normalized: Array = norm(whole, weight, None)
        return normalized

    def logits(self, features: Array) -> Array:
        """Return the logits [n, draft_vocab_size] of rows of `feature`, [n, hidden_size], float32."""
        return self._head.project(features) if self.spec.norm_output else self._head(features, None, None)

    def constants(self) -> list[Array]:
        """Return all arrays that a step reads besides its inputs, except those that kernels own and the target's."""
        return [*self._parts.constants(), *self._layer.rotations.constants()]
