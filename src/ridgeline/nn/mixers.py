"""Run the token mixer of a layer: its input stage, its state, its output stage."""

from __future__ import annotations

from collections.abc import Callable

from ridgeline.nn.step import Rows, Shared, Step, Stream
from ridgeline.ops import OpsTable, api
from ridgeline.ops.api import Array, DenseKeyValues, DenseRows, PagedKeyValues, Rotary, Weights
from ridgeline.ops.indexed import IndexedInput
from ridgeline.ops.stages import AttentionInput, LatentInput, RecurrentBlock
from ridgeline.spec import (
    Attention,
    DeepNormLayer,
    IndexedAttention,
    LatentAttention,
    ModelSpec,
    Norm,
    RecurrentMixer,
    SharedAttention,
)
from ridgeline.spec.storage import UNSCALED, KVScales

# (stream, rotary or None, step) -> residual and delta, both [T, width], and the keys and values that layers share
Mixer = Callable[[Stream, Rotary | None, Step], tuple[Array, Array, Shared]]


def build_mixer(
    spec: ModelSpec, layer: int, weights: Weights, table: OpsTable, scale: float, kv_scales: KVScales = UNSCALED
) -> Mixer:
    """Build the mixer of a layer that has one.

    Args:
        weights: weights of the mixer, and of the norm before it under "norm".
        scale: factor on the delta of the branch before.
        kv_scales: scales of the layer's state in fp8.
    """
    whole = spec.layers[layer]
    mixer, norm = whole.mixer, whole.pre_norm
    assert mixer is not None
    if isinstance(whole, DeepNormLayer):
        norm = None  # its norm is applied outside of the mixer
    match mixer:
        case Attention():
            later = range(layer + 1, len(spec.layers))
            is_shared = any(spec.state_layer(i) == layer for i in later)
            canvas = mixer.over_canvas(spec.canvas) if spec.canvas else None
            return build_attention(layer, mixer, norm, weights, table, scale, kv_scales, is_shared, canvas)
        case SharedAttention():
            return _shared_attention(mixer, norm, weights, table, scale)
        case LatentAttention():
            return _latent_attention(layer, mixer, norm, weights, table, scale, kv_scales)
        case IndexedAttention():
            return _indexed_attention(layer, mixer, norm, weights, table, scale, kv_scales)
        case _:
            return _recurrent(layer, mixer, norm, weights, table, scale)


def build_attention(
    layer: int, mixer: Attention, norm: Norm | None, weights: Weights, table: OpsTable, scale: float,
    kv_scales: KVScales, is_shared: bool, canvas: Attention | None = None,
) -> Mixer:  # fmt: skip
    """Build softmax attention.

    norm: the norm before it. is_shared: whether later layers read its keys and values. canvas: how a pass over a canvas
    attends.
    """
    into, out = weights.parted("o")
    before = table.stage(api.ATTENTION_INPUT, AttentionInput(mixer, norm, scale), into)
    write, attend = table.primitive(api.WRITE_PAGES, mixer), _attend(mixer, weights.vector("sinks"), out, table)
    within = None if canvas is None else _attend(canvas, weights.vector("sinks"), out, table)
    grow = growth(mixer, table)

    def run(stream: Stream, rotary: Rotary | None, step: Step) -> tuple[Array, Array, Shared]:
        target = step.target(layer, kv_scales)
        residual, q, gate, k, v = before(stream.residual, stream.delta, rotary, target)
        parts = () if k is None or v is None else (k, v)  # a kernel wrote them
        state = step.append_kv(layer, write, kv_scales, *parts)
        attended = attend if step.signal is None or within is None else within
        return (
            residual,
            attended(grow(q, step), gate, state),
            {**stream.shared, layer: state} if is_shared else stream.shared,
        )

    return run


def _shared_attention(
    mixer: SharedAttention, norm: Norm | None, weights: Weights, table: OpsTable, scale: float
) -> Mixer:
    into, out = weights.parted("o")
    before = table.stage(api.QUERY_INPUT, AttentionInput(mixer.attention, norm, scale), into)
    attend, grow = _attend(mixer.attention, weights.vector("sinks"), out, table), growth(mixer.attention, table)

    def run(stream: Stream, rotary: Rotary | None, step: Step) -> tuple[Array, Array, Shared]:
        residual, q, gate = before(stream.residual, stream.delta, rotary)
        return residual, attend(grow(q, step), gate, stream.shared[mixer.source]), stream.shared

    return run


def growth(attention: Attention, table: OpsTable) -> Callable[[Array, Step], Array]:
    """Return a function that multiplies queries by the factors of their positions, where attention has such."""
    if attention.growth is None:
        return lambda q, step: q
    kernel = table.primitive(api.GROW_QUERIES, attention.growth)
    return lambda q, step: kernel(q, step.positions)


def _attend(
    attention: Attention, sinks: Array | None, out: Weights, table: OpsTable
) -> Callable[[Array, Array | None, Rows], Array]:
    """Return a function of q, its gate, and keys and values that computes the branch's delta."""
    dense, paged = table.primitive(api.ATTENTION, attention), table.primitive(api.PAGED_ATTENTION, attention)
    after = table.stage(api.ATTENTION_OUTPUT, attention, out)

    def attend(q: Array, gate: Array | None, state: Rows) -> Array:
        keys, values = state.parts
        if isinstance(state, DenseRows):
            return after(dense(q, DenseKeyValues(keys, values, state.lengths, state.scales), sinks), gate)
        return after(paged(q, PagedKeyValues(keys, values, state.layout, state.scales), sinks), gate)

    return attend


def _latent_attention(
    layer: int, mixer: LatentAttention, norm: Norm | None, weights: Weights, table: OpsTable, scale: float,
    kv_scales: KVScales,
) -> Mixer:  # fmt: skip
    into, out = weights.parted("o")
    dense, paged = table.primitive(api.LATENT_ATTENTION, mixer), table.primitive(api.PAGED_LATENT_ATTENTION, mixer)
    reader = table.choose(api.PAGED_LATENT_ATTENTION, mixer).backend
    before = table.stage(api.LATENT_INPUT, LatentInput(mixer, norm, scale, reader), into)
    write = table.primitive(api.WRITE_PAGES, mixer)
    after = table.stage(api.ATTENTION_OUTPUT, mixer, out)
    kv_b = weights.arrays["kv_b.weight"]

    def run(stream: Stream, rotary: Rotary | None, step: Step) -> tuple[Array, Array, Shared]:
        target = step.target(layer, kv_scales)
        residual, q, latents = before(stream.residual, stream.delta, rotary, target)
        parts = () if latents is None else (latents,)  # a kernel wrote them
        state = step.append_kv(layer, write, kv_scales, *parts)
        attended = dense(q, state, kv_b) if isinstance(state, DenseRows) else paged(q, state, kv_b)
        return residual, after(attended, None), stream.shared

    return run


def _indexed_attention(
    layer: int, mixer: IndexedAttention, norm: Norm | None, weights: Weights, table: OpsTable, scale: float,
    kv_scales: KVScales,
) -> Mixer:  # fmt: skip
    into, out = weights.parted("o")
    before = table.stage(api.INDEXED_INPUT, IndexedInput(mixer, norm, scale), into)
    select, attend = table.primitive(api.SELECT_KEYS, mixer), table.primitive(api.INDEXED_ATTENTION, mixer)
    write, after = table.primitive(api.WRITE_PAGES, mixer), table.stage(api.ATTENTION_OUTPUT, mixer.latent, out)
    kv_b = weights.arrays["kv_b.weight"]

    def run(stream: Stream, rotary: Rotary | None, step: Step) -> tuple[Array, Array, Shared]:
        residual, q, latents, keys, index_q, index_weights = before(stream.residual, stream.delta, rotary)
        state = step.append_kv(layer, write, kv_scales, latents, keys)
        chosen = select(index_q, index_weights, state)
        return residual, after(attend(q, state, kv_b, chosen), None), stream.shared

    return run


def _recurrent(
    layer: int, mixer: RecurrentMixer, norm: Norm | None, weights: Weights, table: OpsTable, scale: float
) -> Mixer:
    block = table.stage(api.RECURRENT_BLOCK, RecurrentBlock(mixer, norm, scale), weights)
    parts = mixer.state().parts

    def run(stream: Stream, rotary: Rotary | None, step: Step) -> tuple[Array, Array, Shared]:
        given, kept = step.read_state(layer, parts)
        residual, delta, states, keep = block(stream.residual, stream.delta, given, kept, step.segments)
        step.write_state(layer, states, keep)
        return residual, delta, stream.shared

    return run
