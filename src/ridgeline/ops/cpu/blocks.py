"""Recurrent blocks and the input of latent attention: what every token has of its own by few kernels, and along each
sequence the mixers' compositions over kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ridgeline._kernels import Pool, turn
from ridgeline.ops import api
from ridgeline.ops.api import Op, Rotary, Segments, Weights
from ridgeline.ops.cpu.elementwise import add
from ridgeline.ops.cpu.kernel import never
from ridgeline.ops.cpu.matrices import Floats
from ridgeline.ops.cpu.primitives import KERNELS
from ridgeline.ops.cpu.stages import Parts, Stage, norm_of
from ridgeline.ops.host.memory import NumpyMemory
from ridgeline.ops.host.primitives import cut, split_heads
from ridgeline.ops.host.recurrent import gather, split
from ridgeline.ops.recurrent import bind_mixer
from ridgeline.ops.stages import LatentInput, RecurrentBlock
from ridgeline.spec import (
    S4,
    S4D,
    GatedConvolution,
    GatedDelta,
    KimiDelta,
    LightningAttention,
    Mamba,
    Mamba2,
    RecurrentMixer,
    ShortConvolution,
    TaylorAttention,
)

# The matrices that meet a token as it comes: they are one, and its product has the residual sum and the norm before it.
_FIRST: Mapping[type[RecurrentMixer], tuple[str, ...]] = {
    Mamba: ("in",),
    Mamba2: ("in",),
    ShortConvolution: ("in",),
    GatedConvolution: ("in",),
    TaylorAttention: ("q", "k", "v"),
    LightningAttention: ("qkv", "gate"),
    S4: (),
    S4D: (),
    GatedDelta: ("in_q", "in_k", "in_v", "decay", "beta", "gate"),
    KimiDelta: ("in_q", "in_k", "in_v", "decay_a", "beta", "gate_a"),
}
_MOVES: Mapping[Op[Any], Callable[..., Any]] = {api.SPLIT: split, api.SPLIT_HEADS: split_heads, api.CUT: cut}


class _Table:
    """What a mixer's composition asks for."""

    memory = NumpyMemory()

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    def primitive(self, op: Op[Any], case: object = None) -> Any:
        return _MOVES[op] if op in _MOVES else KERNELS[op].make(case, self._pool)


class _Found:
    """A matrix whose product was made together with others': to be had from those, in their order."""

    def __init__(self, place: int) -> None:
        self._place = place

    def prepare(self) -> None:
        """It is."""

    def apply(self, x: Any) -> Any:
        return x[self._place]


def recurrent_block(case: RecurrentBlock, weights: Weights, pool: Pool) -> Callable[..., Any]:
    names = _FIRST[type(case.mixer)]
    first = _parts(case, names, weights, pool) if names else _normed(case, weights, pool)
    own_linears: dict[str, Any] = {**weights.linears, **{name: _Found(i) for i, name in enumerate(names)}}
    for linear in own_linears.values():
        linear.prepare()
    before, along, after = bind_mixer(case.mixer, Weights(own_linears, weights.arrays), _Table(pool))

    def stage(
        residual: Floats, delta: Floats | None, states: Sequence[Any], kept: Sequence[Any], segments: Segments
    ) -> tuple[Any, Any, Any, Any]:
        total, x = first(residual, delta)
        own, gate = before(x)
        if not kept and _is_rectangle(segments, len(total)):
            (bucket,) = segments.buckets
            shape = np.asarray(bucket.rows).shape
            inputs: list[Any] = [np.asarray(a).reshape(*shape, *a.shape[1:]) for a in own]
            rectangle, left = along(inputs, states, bucket.lengths)
            y: Any = rectangle
            return total, after(y.reshape(len(total), -1), gate), left, ()
        y, left = _run(along, own, states, kept, segments)
        keep: Any = segments.keep
        return total, after(y, gate), left, () if keep is None else [np.asarray(a)[keep] for a in own]

    return stage


def _is_rectangle(segments: Segments, tokens: int) -> bool:
    """Are the tokens as they stand n sequences of m each, and nothing else to be done? So is every step that only
    decodes, and every single prompt."""
    if len(segments.buckets) != 1 or segments.drafts or segments.keep is not None:
        return False
    rows = np.asarray(segments.buckets[0].rows)
    return rows.size == tokens and bool((rows.ravel() == np.arange(tokens)).all())


def _run(
    along: Callable[..., Any], own: Sequence[Any], states: Sequence[Any], kept: Sequence[Any], segments: Segments
) -> tuple[Any, Sequence[Any]]:
    """Bucket after bucket, drafts last: see ops.stages."""
    both = [np.concatenate(pair) for pair in zip(kept, own, strict=True)] if kept else own

    def follow(bucket: Any, given: Sequence[Any]) -> tuple[Any, Any]:
        found: tuple[Any, Any] = along(
            [x[bucket.rows] for x in both], [state[bucket.members] for state in given], bucket.lengths
        )
        return found

    outputs, left = zip(*(follow(bucket, states) for bucket in segments.buckets), strict=True)
    order: Any = segments.sequence_order
    after = [gather(s, 1, order) for s in zip(*left, strict=True)]
    drafted = [follow(bucket, after)[0] for bucket in segments.drafts]
    tokens: Any = segments.order
    return gather([*outputs, *drafted], 2, tokens), after


def _parts(
    case: RecurrentBlock | LatentInput, names: tuple[str, ...], weights: Weights, pool: Pool
) -> Callable[[Floats, Floats | None], tuple[Floats, Any]]:
    return Parts(weights, names, norm_of(case.norm, "norm", weights), case.residual_scale, pool)


def _normed(
    case: RecurrentBlock, weights: Weights, pool: Pool
) -> Callable[[Floats, Floats | None], tuple[Floats, Any]]:
    """The residual sum, and its norm."""
    norm, plus = norm_of(case.norm, "norm", weights), add(None, pool)

    def run(residual: Floats, delta: Floats | None) -> tuple[Floats, Floats]:
        total = residual if delta is None else plus(residual, delta, case.residual_scale)
        if norm is None:
            return total, total
        x = np.empty(total.shape, np.float32)
        norm(pool, total, x)
        return total, x

    return run


def latent_input(case: LatentInput, weights: Weights, pool: Pool) -> Callable[..., Any]:
    m = case.mixer
    first = _parts(case, ("q" if m.q_lora_rank is None else "q_a", "kv_a"), weights, pool)
    latent_norm = norm_of(m.latent_norm, "kv_a_norm", weights)
    second = None
    if m.q_lora_rank is not None:
        second = Parts(weights, ("q_b",), norm_of(m.latent_norm, "q_a_norm", weights), 1.0, pool)
    assert latent_norm is not None

    def stage(residual: Floats, delta: Floats | None, rotary: Rotary | None) -> tuple[Floats, Floats, Floats]:
        total, (q, kept) = first(residual, delta)
        if second:
            q = second(q)[1][0]
        latent = kept[:, : m.kv_lora_rank]
        latent_norm(pool, latent, latent)
        if m.rope and rotary:
            cos, sin = np.asarray(rotary.cos), np.asarray(rotary.sin)
            turn(pool, q, m.qk_head_dim, m.qk_nope_head_dim, m.rope.dim, m.rope.interleaved, cos, sin)
            turn(pool, kept, m.row, m.kv_lora_rank, m.rope.dim, m.rope.interleaved, cos, sin)
        return total, q.reshape(len(q), m.num_heads, m.qk_head_dim), kept[:, None]

    return stage


BLOCKS: Mapping[Op[Any], Stage] = {
    api.RECURRENT_BLOCK: Stage(never, recurrent_block),
    api.LATENT_INPUT: Stage(never, latent_input),
}
