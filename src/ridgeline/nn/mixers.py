"""How a layer's token mixer runs: its input stage, what it adds to the state and reads of it, its output stage."""

from __future__ import annotations

from collections.abc import Callable

from ridgeline.nn.step import Step
from ridgeline.ops import OpsTable, api
from ridgeline.ops.api import Array, DenseKeyValues, DenseRows, PagedKeyValues, Rotary, Weights
from ridgeline.ops.stages import AttentionInput, LatentInput, RecurrentBlock
from ridgeline.spec import Attention, LatentAttention, Norm, RecurrentMixer, TokenMixer

# (residual, delta or None, rotary or None, step) -> residual, the branch's delta, both [T, width]
Mixer = Callable[[Array, Array | None, Rotary | None, Step], tuple[Array, Array]]


def build_mixer(
    layer: int, mixer: TokenMixer, norm: Norm | None, weights: Weights, table: OpsTable, scale: float
) -> Mixer:
    """The mixer of a layer. norm: before it; its weights are "norm". scale: of the delta that it receives."""
    match mixer:
        case Attention():
            return _attention(layer, mixer, norm, weights, table, scale)
        case LatentAttention():
            return _latent_attention(layer, mixer, norm, weights, table, scale)
        case _:
            return _recurrent(layer, mixer, norm, weights, table, scale)


def _attention(
    layer: int, mixer: Attention, norm: Norm | None, weights: Weights, table: OpsTable, scale: float
) -> Mixer:
    before = table.stage(api.ATTENTION_INPUT, AttentionInput(mixer, norm, scale), weights)
    dense, paged = table.primitive(api.ATTENTION, mixer), table.primitive(api.PAGED_ATTENTION, mixer)
    after = table.stage(api.ATTENTION_OUTPUT, mixer, weights)

    def run(residual: Array, delta: Array | None, rotary: Rotary | None, step: Step) -> tuple[Array, Array]:
        residual, q, k, v = before(residual, delta, rotary)
        state = step.extend(layer, k, v)
        keys, values = state.parts
        if isinstance(state, DenseRows):
            return residual, after(dense(q, DenseKeyValues(keys, values, state.lengths)))
        return residual, after(paged(q, PagedKeyValues(keys, values, state.layout)))

    return run


def _latent_attention(
    layer: int, mixer: LatentAttention, norm: Norm | None, weights: Weights, table: OpsTable, scale: float
) -> Mixer:
    before = table.stage(api.LATENT_INPUT, LatentInput(mixer, norm, scale), weights)
    dense, paged = table.primitive(api.LATENT_ATTENTION, mixer), table.primitive(api.PAGED_LATENT_ATTENTION, mixer)
    after = table.stage(api.ATTENTION_OUTPUT, mixer, weights)
    kv_b = weights.arrays["kv_b.weight"]

    def run(residual: Array, delta: Array | None, rotary: Rotary | None, step: Step) -> tuple[Array, Array]:
        residual, q, latents = before(residual, delta, rotary)
        state = step.extend(layer, latents)
        attended = dense(q, state, kv_b) if isinstance(state, DenseRows) else paged(q, state, kv_b)
        return residual, after(attended)

    return run


def _recurrent(
    layer: int, mixer: RecurrentMixer, norm: Norm | None, weights: Weights, table: OpsTable, scale: float
) -> Mixer:
    block = table.stage(api.RECURRENT_BLOCK, RecurrentBlock(mixer, norm, scale), weights)
    parts = mixer.state().parts

    def run(residual: Array, delta: Array | None, rotary: Rotary | None, step: Step) -> tuple[Array, Array]:
        residual, delta, states = block(residual, delta, step.recall(layer, parts), step.segments)
        step.remember(layer, states)
        return residual, delta

    return run
