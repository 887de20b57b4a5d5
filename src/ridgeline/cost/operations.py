"""Count the arithmetic and the bytes of every operation of a forward pass.

    matrix          2 T in out operations; it reads its weights once, and moves T (in + out) activations. Matrices that
                    read the same activations count as one operation (q+k+v, gate+up), which reads them once.
    attention etc.  the mixer counts its own work and traffic (spec/mixer.py)
    experts         read the weights of the experts that T tokens are expected to visit, if all are equally likely
    norms           read and write the residual stream around each branch

T is the number of tokens of all sequences in the step. Equal operations of several layers are listed once, with the
number of layers. Intensity is operations per byte. By the roofline, an operation takes at least the time of its
arithmetic and at least the time of its bytes (Williams et al. 2009; for transformers "How to Scale Your Model", Austin
et al. 2025).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ridgeline.cost.precision import FLOAT_BYTES, Precision
from ridgeline.spec import AnyLayer, ChannelMixer, Layer, ModelSpec, TokenMixer, Weight
from ridgeline.spec.heads import LAYER, Eagle3Spec, HeadSpec, MedusaSpec
from ridgeline.spec.per_layer import TABLE

Kind = Literal["weights", "state", "other"]  # the kind of most of its bytes
# Groups of matrices that read the same activations, by the names of their weights.
TOGETHER = (
    ("q", "k", "v", "out_gate"), ("q_a", "kv_a"), ("in_q", "in_k", "in_v"), ("gate", "up"),
    ("experts.gate", "experts.up"), ("shared.gate", "shared.up"),
    ("dense.gate", "dense.up"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Slice:
    """Equal sequences of a step.

    count: number of sequences. tokens: new tokens of each. context: tokens of each after the step. sampled: rows of
    logits of each.
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
    """One operation of `layers` layers. All figures are for one layer.

    Args:
        flops: Operations; a product and its sum are two.
        compute: Type that it computes in.
        split: Axis along which its weights may be split over devices.
        whole_bytes: Bytes of activations that every device reads or writes in full when the operation is split.
        state_shards: Largest number of devices that its state is divided over.
        reduced_bytes: Bytes that are summed over the devices after a split operation, or by an all-reduce.
        link_bytes, messages: Bytes that a device sends, and messages that follow each other.
        devices: Number of devices that send data to each other.
        passes: Pairs (numbers of `stored` type, rows of activations that are multiplied with them). Calibration
            measures the rates of these. Empty for operations that are timed in another way.
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
    whole_bytes: float = 0.0
    state_shards: int = 1
    reduced_bytes: float = 0.0
    link_bytes: float = 0.0
    messages: int = 0
    devices: int = 1
    passes: tuple[tuple[float, float], ...] = ()
    stored: str = ""

    @property
    def bytes(self) -> float:
        return self.weight_bytes + self.state_bytes + self.activation_bytes

    @property
    def intensity(self) -> float:
        """Return the operations per byte."""
        return self.flops / self.bytes if self.bytes else 0.0


def operations(spec: ModelSpec, batch: Sequence[Slice], precision: Precision) -> tuple[Operation, ...]:
    """Return the operations of one step in the order in which they run.

    For many steps of one model keep a `Forward`.
    """
    return Forward(spec, precision).operations(batch)


def visited_experts(moe: ChannelMixer, tokens: float) -> float:
    """Return the expected number of experts that at least one of `tokens` tokens visits, if all are equally likely."""
    missed = 1 - moe.visits / moe.num_experts
    return moe.num_experts * (1 - float(missed**tokens))


def num_logits(spec: ModelSpec | HeadSpec) -> int:
    """Return the logits of a row: those of all heads for Medusa, of the tokens that it can propose for EAGLE."""
    if isinstance(spec, ModelSpec):
        return spec.vocab_size
    return spec.draft_vocab_size * (spec.num_heads if isinstance(spec, MedusaSpec) else 1)


class Forward:
    """Counts any step of one model, in a few microseconds for each kind of operation.

    A head for speculative decoding counts as a model: all heads of Medusa are one step, and so is one depth of EAGLE.
    """

    def __init__(self, spec: ModelSpec | HeadSpec, precision: Precision) -> None:
        self.spec, self.precision = spec, precision
        parts: dict[_Part, int] = {}
        if isinstance(spec, ModelSpec):
            if spec.layer_embeddings:
                own = [w for w in spec.layer_embeddings.weights(spec.hidden_size, len(spec.layers)) if w.name != TABLE]
                parts |= dict.fromkeys(_matrices(iter(own), precision, None, spec.hidden_size), 1)
            for layer, count in Counter(spec.layers).items():
                for part in _parts(layer, spec.hidden_size, precision):
                    parts[part] = parts.get(part, 0) + count
        else:
            for part in _head_parts(spec, precision):
                parts[part] = parts.get(part, 0) + 1
        self._logits = num_logits(spec)
        self._head = _matrix((Weight("head.weight", (self._logits, spec.hidden_size), "out"),), precision)
        transform = spec.head_transform if isinstance(spec, ModelSpec) else None
        before = transform.weights(spec.hidden_size) if transform else ()
        self._transform = [_matrix((w,), precision) for w in before if w.is_matrix]
        self._parts = parts

    def operations(self, batch: Sequence[Slice]) -> tuple[Operation, ...]:
        """Return the operations of one step in the order in which they run."""
        precision, width = self.precision, self.spec.hidden_size
        tokens = sum(s.count * s.tokens for s in batch)
        rows = sum(s.count * s.sampled for s in batch)
        stream = precision.activation_bytes(tokens * width)
        embed = Operation("embed", "other", 1, 0.0, 0.0, 0.0, 2 * stream, precision.activations)
        found = [embed, *(part.at(tokens, batch, layers) for part, layers in self._parts.items())]
        found.append(Operation("norm", "other", 1, 0.0, 0.0, 0.0, 2 * stream, precision.activations))
        if rows:
            found += [matrix.at(rows, batch, 1) for matrix in self._transform]
            found.append(self._head.at(rows, batch, 1, results=rows * self._logits * FLOAT_BYTES))
        return tuple(found)

    def state_operations(self, batch: Sequence[Slice]) -> tuple[Operation, ...]:
        """Return only the operations that read state: all of their figures are sums over sequences."""
        tokens = sum(s.count * s.tokens for s in batch)
        parts = self._parts.items()
        return tuple(part.at(tokens, batch, layers) for part, layers in parts if isinstance(part, _Core))


@dataclass(frozen=True, slots=True)
class _Matrix:
    """Matrices that read the same activations.

    columns, rows: numbers that they read and write for each token. stored: bytes. type: type that they are stored in.
    moe: the layer's experts, if these are matrices of experts; then num_params and stored count one expert. reduced:
    numbers per token that devices sum afterwards.
    """

    name: str
    num_params: int
    columns: int
    rows: int
    stored: float
    split: str | None
    precision: Precision
    moe: ChannelMixer | None = None
    reduced: int = 0
    type: str = ""

    def at(self, tokens: int, batch: Sequence[Slice], layers: int, results: float | None = None) -> Operation:
        """Count a step. results: bytes of the results, if they have another type than the activations."""
        precision = self.precision
        runs = tokens * self.moe.visits if self.moe else tokens
        times = visited_experts(self.moe, tokens) if self.moe else 1.0
        read = precision.activation_bytes(runs * self.columns)
        written = precision.activation_bytes(runs * self.rows) if results is None else results
        return Operation(
            self.name, "weights", layers, 2.0 * runs * self.num_params, self.stored * times, 0.0, read + written,
            precision.compute, self.split, whole_bytes=written if self.split == "in" else read,
            reduced_bytes=precision.activation_bytes(tokens * self.reduced),
            passes=((times * self.num_params, runs / times),), stored=self.type,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Core:
    """A mixer's work that is not a product with weights: attention, scans, convolutions."""

    mixer: TokenMixer
    precision: Precision

    def at(self, tokens: int, batch: Sequence[Slice], layers: int) -> Operation:
        state, passes = self.mixer.reads(), []
        flops = moved = kept = 0.0
        for s in batch:
            work, traffic = self.mixer.work(s.tokens, s.context), self.mixer.traffic(s.tokens, s.context)
            if group := self.mixer.query_group:
                rows = group * s.tokens
                passes.append((s.count * work / rows, float(rows)))
            flops += 2.0 * s.count * work
            moved += s.count * self.precision.activation_bytes(traffic.activations)
            kept += s.count * self.precision.state_bytes(traffic.state, state.parts[-1][-1], snapshot=state.snapshot)
        return Operation(
            self.mixer.kind, "state", layers, flops, 0.0, kept, moved, self.precision.activations, "head",
            state_shards=self.mixer.cut().state, passes=tuple(passes), stored=self.precision.state,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Norm:
    """A norm reads and writes the residual stream, reads a branch's result, and writes the next branch's input."""

    width: int
    precision: Precision

    def at(self, tokens: int, batch: Sequence[Slice], layers: int) -> Operation:
        moved = 4 * self.precision.activation_bytes(tokens * self.width)
        return Operation("norm", "other", layers, 0.0, 0.0, 0.0, moved, self.precision.activations)


_Part = _Matrix | _Core | _Norm


def _parts(layer: AnyLayer, width: int, precision: Precision) -> Iterator[_Part]:
    if layer.mixer:
        yield _Norm(width, precision)
        outs = list(_matrices(layer.mixer.weights(width), precision, None, width))
        last = [m for m in outs if m.split == "in" and m.rows == width]
        yield from (m for m in outs if m not in last)
        yield _Core(layer.mixer.cost_key(), precision)
        yield from last
    if layer.mlp:
        yield _Norm(width, precision)
        yield from _matrices(layer.mlp.weights(width), precision, layer.mlp, width)
    if isinstance(layer, Layer) and layer.embedded:
        yield _Norm(width, precision)
        own = [Weight(f"embedded.{w.name}", w.shape, w.split) for w in layer.embedded.weights(width)]
        yield from _matrices(iter(own), precision, None, width)


def _head_parts(spec: HeadSpec, precision: Precision) -> Iterator[_Part]:
    """Yield the parts of a head for speculative decoding, without its output matrix."""
    if isinstance(spec, MedusaSpec):
        for block in range(spec.num_blocks):  # all heads together: they do not depend on each other
            own = [Weight(f"blocks.{h}.{block}.weight", (spec.hidden_size,) * 2) for h in range(spec.num_heads)]
            yield replace(_matrix(own, precision), name="blocks")
        return
    width, norm = spec.hidden_size, _Norm(spec.hidden_size, precision)
    yield from _matrices(_below(spec, "fc", keep=True), precision, None, width)
    if isinstance(spec, Eagle3Spec):
        yield norm
    outs = list(_matrices(_below(spec, f"{LAYER}.mixer"), precision, None, width))
    last = [m for m in outs if m.split == "in" and m.rows == width]
    yield from (m for m in outs if m not in last)
    yield _Core(spec.attention.cost_key(), precision)
    yield from last
    yield norm
    yield from _matrices(_below(spec, f"{LAYER}.mlp"), precision, spec.mlp, width)


def _below(spec: HeadSpec, part: str, *, keep: bool = False) -> Iterator[Weight]:
    """Yield the weights of a part of a head. keep: with the part's name; without it they are named as in a layer."""
    for w in spec.weights():
        if w.name.startswith(f"{part}."):
            yield w if keep else Weight(w.name.removeprefix(f"{part}."), w.shape, w.split)


def _matrices(
    weights: Iterator[Weight], precision: Precision, mlp: ChannelMixer | None, width: int
) -> Iterator[_Matrix]:
    """Yield the matrices of a layer's part.

    width: the hidden size. Devices sum the stream once if experts and a shared MLP both add to it.
    """
    found: dict[tuple[str, ...], list[Weight]] = {}
    for weight in weights:
        if weight.is_matrix:
            name = weight.name.removesuffix(".weight")
            found.setdefault(next((t for t in TOGETHER if name in t), (name,)), []).append(weight)
    moe = mlp if mlp and mlp.num_experts else None
    for group in found.values():
        one = _matrix(group, precision, moe)
        if one.split == "in":
            one = replace(one, reduced=0 if one.name.startswith("shared.") else width if moe else one.rows)
        yield one


def _matrix(weights: Sequence[Weight], precision: Precision, moe: ChannelMixer | None = None) -> _Matrix:
    name = "+".join(w.name.removesuffix(".weight") for w in weights)
    if moe is None or not name.startswith("experts."):
        moe = None
    else:  # count one expert
        weights = [Weight(w.name, w.shape[1:], w.split) for w in weights]
    first = weights[0]
    count = sum(w.num_params for w in weights)
    filters = (
        len(first.shape) == 3 and first.shape[1] == 1
    )  # a convolution has one filter for each channel that it reads
    columns = first.shape[0] if filters else first.shape[-1]
    stored = sum(precision.weight_bytes(w) for w in weights)
    rows = sum(w.num_params // w.shape[-1] for w in weights)
    return _Matrix(name, count, columns, rows, stored, first.split, precision, moe, type=precision.stored_type(first))
