"""The distance of linear attention from softmax attention: by the weights that each gives to earlier tokens.

Linear attention learns its queries and keys before anything else: the weights of one of its heads must become those of
the attention head in whose place it stands (Hedgehog, arXiv:2402.04347; LoLCATs, arXiv:2410.10254; stage 1 of MOHAWK,
arXiv:2408.10189).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from ridgeline.errors import DataError
from ridgeline.nn import Capture, Model
from ridgeline.nn.binding import How, mixer_weights
from ridgeline.nn.mixers import growth
from ridgeline.ops import OpsTable, api
from ridgeline.ops.api import DenseKeyValues
from ridgeline.ops.reference.recurrent import features_of
from ridgeline.ops.stages import AttentionInput
from ridgeline.runtime.step import DenseStep
from ridgeline.spec import DeepNormLayer, ModelSpec, Rope, TaylorAttention
from ridgeline.spec.quant import AS_STORED
from ridgeline.spec.storage import UNSCALED
from ridgeline.train.module import LanguageModel
from ridgeline.train.objectives import Objective, check_widths, stream_name

LEAST = 1e-30  # a weight of softmax attention below it counts as 0


def linear_layers(spec: ModelSpec) -> tuple[int, ...]:
    """Return the layers with linear attention whose features are known."""
    return tuple(i for i, layer in enumerate(spec.layers) if layer.mixer and layer.mixer.imitates_softmax)


def linear_attention(spec: ModelSpec, layer: int) -> TaylorAttention:
    """Return the mixer of a layer that `linear_layers` names."""
    return cast("TaylorAttention", spec.layers[layer].mixer)


def mixing_names(spec: ModelSpec) -> tuple[str, ...]:
    """Return the names of the weights that decide the weights of earlier tokens."""
    return tuple(f"layers.{i}.mixer.{name}.weight" for i in linear_layers(spec) for name in "qk")


def check_mixing(student: ModelSpec, teacher: ModelSpec, trained: Sequence[str] = ()) -> None:
    """Raise DataError where a student has no linear attention, or stands beside no attention of the same heads.

    trained: patterns of the names of the weights that train, of which one must match q or k of such a layer; empty: all
    of `mixing_names`.
    """
    check_widths(student, teacher)
    layers = linear_layers(student)
    if not layers:
        raise DataError(
            "stage matrices is for students with linear attention, as ridgeline convert --to linear=64:1 or "
            "hybrid=hedgehog:1 makes them; leave it out of --stages"
        )
    if len(student.layers) != len(teacher.layers):
        raise DataError(
            f"stage matrices compares layers one by one, and the student has {len(student.layers)} layers and the "
            f"teacher {len(teacher.layers)}; leave it out of --stages"
        )
    for i in layers:
        heads, other = linear_attention(student, i).num_heads, teacher.attention(i)
        if other is None or other.num_heads != heads or teacher.state_layer(i) != i:
            raise DataError(
                f"stage matrices: layer {i} of the teacher has no attention with {heads} heads and KV heads of "
                "its own; leave the stage out of --stages"
            )
    names = mixing_names(student)
    if trained and not any(fnmatchcase(name, pattern) for name in names for pattern in trained):
        raise DataError(
            f"stage matrices trains q and k of linear layers, such as {names[0]}, and no pattern of --train "
            f"({', '.join(trained):.100}) matches one; add layers.*.mixer.[qk].weight, or leave the stage "
            "out of --stages"
        )


class MixingDivergence(Objective):
    """KL(attention || linear attention) of the weights that a query gives to the tokens up to its own, in nats.

    Both read the teacher's residual stream. The loss of a token is the mean over the heads of linear layers.
    """

    def __init__(self, student: LanguageModel, teacher: Model) -> None:
        super().__init__(student)
        check_mixing(student.spec, teacher.spec)
        self._layers = linear_layers(student.spec)
        # In lists, as everything that is no part of the student.
        self._teacher = [teacher]
        self._softmax = [SoftmaxWeights(teacher, i, student.table) for i in self._layers]

    def forward(self, token_ids: Tensor, positions: Tensor, lengths: tuple[int, ...], targets: Tensor) -> Tensor:
        step = self.student.step(token_ids, positions, lengths)
        streams, rotaries = self._streams(step)
        rows = targets >= 0
        found = []
        for i, softmax, stream in zip(self._layers, self._softmax, streams, strict=True):
            with torch.no_grad():
                wanted = softmax(stream, rotaries, step)
            given = linear_weights(self.student, i, stream, lengths)
            parts = torch.split(rows, list(lengths))
            found.append(
                sum(_divergence(p, w)[:, own].mean(0).sum() for p, w, own in zip(wanted, given, parts, strict=True))
            )
        return torch.stack(cast("list[Tensor]", found)).mean()

    @torch.no_grad()
    def _streams(self, step: DenseStep) -> tuple[list[Tensor], Any]:
        """Return the teacher's stream before each layer with linear attention, and the rotations of the step."""
        model, names = self._teacher[0], [stream_name(i) for i in self._layers]
        capture = Capture(model.spec, names)
        model.forward(step, capture)
        return [cast("Tensor", capture.outputs[name]) for name in names], model.rotaries(step)


class SoftmaxWeights:
    """The weights that the softmax attention of a layer gives to tokens.

    They are its results for values that name their tokens. So norms, rotations, windows and all other parts count.
    """

    def __init__(self, model: Model, layer: int, table: OpsTable) -> None:
        whole, own = model.spec.layers[layer], model.spec.attention(layer)
        assert own is not None  # `check_mixing` has seen it
        norm = None if isinstance(whole, DeepNormLayer) else whole.pre_norm
        weights = mixer_weights(model.spec, layer, model.weights, How(table, AS_STORED, {}, None))
        into, _ = weights.parted("o")
        self._own, self._sinks = own, weights.vector("sinks")
        self._input = table.stage(api.ATTENTION_INPUT, AttentionInput(own, norm, 1.0), into)
        self._attend, self._grow = table.primitive(api.ATTENTION, own), growth(own, table)

    def __call__(self, stream: Tensor, rotaries: Mapping[Rope, Any], step: DenseStep) -> list[Tensor]:
        """Return the weights [heads, tokens, tokens] of each sequence; those of a query have the sum 1."""
        own = self._own
        rotary = rotaries[own.rope] if own.rope else None
        given: Any = stream
        _, q, _, k, _ = self._input(given, None, rotary, None)
        both: tuple[Any, Any] = self._grow(q, step), k
        found = []
        for queries, keys in zip(*(x.split(list(step.lengths)) for x in both), strict=True):
            count = len(queries)
            each = torch.eye(count, dtype=keys.dtype, device=keys.device)
            values: Any = each[:, None].expand(-1, own.num_kv_heads, -1)
            some: Any = self._attend(queries, DenseKeyValues(keys, values, (count,), UNSCALED), self._sinks)
            weights = some.unflatten(-1, (own.num_heads, count)).transpose(0, 1)
            found.append(weights / weights.sum(-1, keepdim=True))  # sinks took a part
        return found


def linear_weights(student: LanguageModel, layer: int, stream: Tensor, lengths: Sequence[int]) -> list[Tensor]:
    """Return the weights [heads, tokens, tokens] that linear attention gives to tokens, for each sequence."""
    whole, weights = student.spec.layers[layer], cast("Mapping[str, Any]", student.weights())
    own = linear_attention(student.spec, layer)
    bound = mixer_weights(student.spec, layer, weights, How(student.table, AS_STORED, {}, None))
    matrices = [weights[f"layers.{layer}.mixer.{name}.weight"] for name in "qk"]
    x: Any = stream.to(matrices[0].dtype)
    if whole.pre_norm and not isinstance(whole, DeepNormLayer):
        norm = student.table.primitive(api.NORM, whole.pre_norm)
        x = norm(x, bound.arrays["norm.weight"], bound.vector("norm.bias"))
    expand = features_of(own)
    by_head = (*x.shape[:-1], own.num_heads, -1)
    q, k = (expand(F.linear(x, matrix).reshape(by_head)) for matrix in matrices)
    found = []
    for queries, keys in zip(*(part.split(list(lengths)) for part in (q, k)), strict=True):
        products = torch.einsum("thf,shf->hts", queries, keys).tril()
        found.append(products / products.sum(-1, keepdim=True))
    return found


def _divergence(wanted: Tensor, found: Tensor) -> Tensor:
    """Return KL(wanted || found) of each query [heads, tokens]. A token with no weight in `wanted` adds nothing."""
    logs = torch.log(torch.clamp(found, min=LEAST))
    return (torch.xlogy(wanted, wanted) - wanted * logs).sum(-1)
