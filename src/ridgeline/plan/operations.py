"""What a step does: every operation of a forward pass, its arithmetic and its bytes.

    matrix          2 T in out operations; its weights once, T (in + out) activations
    attention etc.  what the mixer says of its work; the state that it reads and writes, queries and results
    experts         those that T tokens are expected to visit, if each is as likely as the other
    norms           the residual stream, read and written around each branch

T tokens of all sequences of the step. An operation that is the same in several layers stands there once, with their
number. Intensity is operations per byte; the roofline bounds its time by the slower of the two
(Williams et al. 2009; for transformers "How to Scale Your Model", Austin et al. 2025).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ridgeline.plan.precision import FLOAT_BYTES, Precision
from ridgeline.spec import ModelSpec, MoE, State, Weight
from ridgeline.spec.mixers import ChannelMixer, TokenMixer

Kind = Literal["weights", "state", "other"]  # what most of its bytes are


@dataclass(frozen=True, slots=True)
class Slice:
    """Sequences of a step that are alike: `count` of them, each with `tokens` new tokens, `context` in all then.

    sampled: rows of logits of each.
    """

    count: int
    tokens: int
    context: int
    sampled: int = 1

    def __post_init__(self) -> None:
        if self.count < 1 or self.tokens < 1 or self.sampled < 0:
            raise ValueError("a slice has at least one sequence with one token")
        if self.context < self.tokens:
            raise ValueError(f"{self.tokens} tokens do not fit in a context of {self.context}")


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation of `layers` layers. All figures are of one layer.

    flops: a product and its sum are two. compute: the type that it computes in. split: the axis along which its weights
    may be split over devices.
    """

    name: str
    kind: Kind
    layers: int
    flops: float
    weight_bytes: float
    state_bytes: float
    activation_bytes: float
    compute: str
    split: str | None = None

    @property
    def bytes(self) -> float:
        return self.weight_bytes + self.state_bytes + self.activation_bytes

    @property
    def intensity(self) -> float:
        """Operations per byte."""
        return self.flops / self.bytes if self.bytes else 0.0


def operations(spec: ModelSpec, batch: Sequence[Slice], precision: Precision) -> tuple[Operation, ...]:
    """Of one step, in the order in which they run first."""
    found: dict[Operation, int] = {}
    for one in _all(spec, batch, precision):
        found[one] = found.get(one, 0) + 1
    return tuple(replace(one, layers=count) for one, count in found.items())


def _all(spec: ModelSpec, batch: Sequence[Slice], precision: Precision) -> Iterator[Operation]:
    tokens = sum(s.count * s.tokens for s in batch)
    rows = sum(s.count * s.sampled for s in batch)
    width = spec.hidden_size
    stream = precision.activation_bytes(tokens * width)
    yield Operation("embed", "other", 1, 0.0, 0.0, 0.0, 2 * stream, precision.compute)
    for i, layer in enumerate(spec.layers):
        mixer = layer.mixer
        yield from _matrices(mixer.weights(width), tokens, precision)
        state = spec.layers[spec.state_layer(i)].mixer.state()
        yield core(mixer, state, spec.state_layer(i) == i, batch, precision)
        yield Operation("norm", "other", 1, 0.0, 0.0, 0.0, 4 * stream, precision.compute)
        if layer.mlp:
            yield from _channel(layer.mlp, width, tokens, precision)
            yield Operation("norm", "other", 1, 0.0, 0.0, 0.0, 4 * stream, precision.compute)
    head = Weight("head.weight", (spec.vocab_size, width), "out")
    yield _matrix(head, rows, precision, results=rows * spec.vocab_size * FLOAT_BYTES)


def _matrices(weights: Iterator[Weight], tokens: int, precision: Precision) -> Iterator[Operation]:
    for weight in weights:
        if weight.is_matrix:
            yield _matrix(weight, tokens, precision)


def _matrix(weight: Weight, tokens: float, precision: Precision, results: float | None = None) -> Operation:
    """results: bytes of what comes out, where it is not of the activations' type."""
    columns = weight.shape[-1]
    out = weight.num_params // columns
    if results is None:
        results = precision.activation_bytes(tokens * out)
    moved = precision.activation_bytes(tokens * columns) + results
    flops = 2.0 * tokens * weight.num_params
    name = weight.name.removesuffix(".weight")
    stored = precision.weight_bytes(weight)
    return Operation(name, "weights", 1, flops, stored, 0.0, moved, precision.compute, weight.split)


def _channel(mlp: ChannelMixer, width: int, tokens: int, precision: Precision) -> Iterator[Operation]:
    for weight in mlp.weights(width):
        if not weight.is_matrix:
            continue
        if isinstance(mlp, MoE) and weight.name.startswith("experts."):
            yield _experts(mlp, weight, tokens, precision)
        else:
            yield _matrix(weight, tokens, precision)


def _experts(moe: MoE, weight: Weight, tokens: int, precision: Precision) -> Operation:
    each = Weight(weight.name, weight.shape[1:], weight.split)
    one = _matrix(each, tokens * moe.num_experts_per_tok, precision)
    return replace(one, weight_bytes=one.weight_bytes * visited_experts(moe, tokens))


def visited_experts(moe: MoE, tokens: int) -> float:
    """Expected number of experts that at least one of so many tokens visits, each choice being as likely."""
    missed = 1 - moe.num_experts_per_tok / moe.num_experts
    return moe.num_experts * (1 - missed**tokens)


def core(mixer: TokenMixer, state: State, owns: bool, batch: Sequence[Slice], precision: Precision) -> Operation:
    """What is no matrix product with weights: attention, scans, convolutions. owns: the state is the layer's own."""
    flops = moved = kept = 0.0
    for s in batch:
        tokens = s.count * s.tokens
        flops += 2.0 * s.count * mixer.work(s.tokens, mean_context(s.tokens, s.context))
        moved += precision.activation_bytes(tokens * _core_width(mixer))
        kept += s.count * _state_traffic(state, owns, s, precision)
    return Operation(type(mixer).__name__, "state", 1, flops, 0.0, kept, moved, precision.compute, "head")


def mean_context(tokens: int, context: int) -> int:
    """Tokens that each of the last `tokens` of a context sees on average, itself included."""
    return context - (tokens - 1) // 2


def _core_width(mixer: TokenMixer) -> int:
    """Numbers per token that go in and come out, beside the state."""
    outs = [w for w in mixer.weights(1) if w.name in ("o.weight", "out.weight")]
    return 2 * sum(w.shape[-1] for w in outs)


def _state_traffic(state: State, owns: bool, s: Slice, precision: Precision) -> int:
    """Bytes of state that one sequence reads and writes in one layer."""
    row = state.parts[-1][-1] if state.parts else 1
    if state.snapshot:
        return precision.state_bytes(2 * state.elements, row, snapshot=True)
    seen = state.elements_at(s.context - s.tokens) + state.elements * s.tokens  # before, and in the step itself
    return precision.state_bytes(seen if owns else min(seen, state.elements_at(s.context)), row, snapshot=False)
