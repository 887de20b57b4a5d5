"""Recurrent blocks and the input of latent attention on kernels.

Operations on single tokens are fused into few kernels. Along each sequence, the mixers' compositions run on kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import numpy as np

from ridgeline._kernels import Pool, rotate
from ridgeline._kernels import scale as multiply
from ridgeline.ops import api
from ridgeline.ops.api import Op, PageTarget, Rotary, Segments, SequenceBucket, Weights
from ridgeline.ops.cpu import tokens
from ridgeline.ops.cpu.elementwise import add
from ridgeline.ops.cpu.kernel import empty, never
from ridgeline.ops.cpu.matrices import Floats
from ridgeline.ops.cpu.primitives import KERNELS
from ridgeline.ops.cpu.stages import Products, Stage, norm_of
from ridgeline.ops.cpu.state import StatesInPages
from ridgeline.ops.host.memory import NumpyMemory
from ridgeline.ops.host.primitives import cut, split_heads
from ridgeline.ops.host.recurrent import gather, split
from ridgeline.ops.parts import Along, Follow, Gather, Take, follow_segments, recurrent_body
from ridgeline.ops.recurrent import bind_mixer, input_matrices
from ridgeline.ops.stages import LatentInput, RecurrentBlock

_MOVES: Mapping[Op[Any], Callable[..., Any]] = {api.SPLIT: split, api.SPLIT_HEADS: split_heads, api.CUT: cut}


class _Table:
    """The primitives of a mixer's composition, on kernels."""

    memory = NumpyMemory()

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    def primitive(self, op: Op[Any], case: object = None) -> Any:
        return _MOVES[op] if op in _MOVES else KERNELS[op].make(case, self._pool)


class _Computed:
    """A matrix whose product is one of several that were computed at once; `apply` picks it by its index."""

    def __init__(self, index: int) -> None:
        self._index = index

    def prepare(self) -> None:
        """Do nothing: the product is there."""

    def apply(self, x: Any) -> Any:
        return x[self._index]


def recurrent_block(case: RecurrentBlock, weights: Weights, pool: Pool) -> Callable[..., Any]:
    names = input_matrices(case.mixer)  # packed as one, whose kernel adds the residual and applies the norm
    first: Any = _products(case, names, weights, pool) if names else _normed(case, weights, pool)
    own_linears: dict[str, Any] = {**weights.linears, **{name: _Computed(i) for i, name in enumerate(names)}}
    for linear in own_linears.values():
        linear.prepare()
    parts = bind_mixer(case.mixer, Weights(own_linears, weights.arrays), _Table(pool))
    take, join = cast(Take, tokens.take(None, pool)), cast(Gather, gather)
    follow = _follow_in_pages(parts.along, follow_segments(parts.along, take, join), pool)
    return recurrent_body(first, parts, _follow_rectangle(parts.along, follow), take)


def _follow_rectangle(along: Along, otherwise: Follow) -> Follow:
    """Return a function that runs n sequences of m tokens each without copies, and all other steps by `otherwise`."""

    def follow(own: Any, states: Any, kept: Any, segments: Segments) -> tuple[Any, Any]:
        tokens = len(own[0])
        if kept or not _is_rectangle(segments, tokens):
            return otherwise(own, states, kept, segments)
        (bucket,) = segments.buckets
        shape = np.asarray(bucket.rows).shape
        y, left = along([np.asarray(a).reshape(*shape, *a.shape[1:]) for a in own], states, bucket.lengths)
        return np.asarray(y).reshape(tokens, -1), left

    return follow


def _follow_in_pages(along: Along, otherwise: Follow, pool: Pool) -> Follow:
    """Return a function that updates all sequences in their pages at once, and then runs the drafts of all of them.

    Its calls are kernels, so it can be recorded. Steps whose sequences are in several buckets run by `otherwise`.
    """

    def follow(own: Any, states: Any, kept: Any, segments: Segments) -> tuple[Any, Any]:
        if not _is_one_bucket(segments, states):
            return otherwise(own, states, kept, segments)
        inputs = [*zip(kept, own, strict=True)] if kept else [(x,) for x in own]

        def run(bucket: SequenceBucket, given: Any) -> tuple[Any, Any]:
            return along(
                [tokens.rows_from(pool, parts, np.asarray(bucket.rows)) for parts in inputs], given, bucket.lengths
            )

        y, after = run(segments.buckets[0], states)
        outputs = [y, *(run(bucket, [state.aside() for state in after])[0] for bucket in segments.drafts)]
        flat = [x.reshape(-1, x.shape[-1]) for x in outputs]
        return tokens.rows_from(pool, flat, np.asarray(segments.order)), after

    return follow


def _is_one_bucket(segments: Segments, states: Any) -> bool:
    """Return whether all sequences are in one bucket, in order, with their states in pages, and all or none draft."""
    buckets = (*segments.buckets, *segments.drafts)
    if len(segments.buckets) != 1 or len(segments.drafts) > 1:
        return False
    if not all(isinstance(state, StatesInPages) for state in states):
        return False
    everyone = np.arange(len(np.asarray(segments.sequence_order)))
    return all(np.array_equal(np.asarray(bucket.members), everyone) for bucket in buckets)


def _is_rectangle(segments: Segments, tokens: int) -> bool:
    """Return whether the tokens are n sequences of m each, in order and without drafts.

    Steps that only decode, and steps of a single prompt, are of this kind.
    """
    if len(segments.buckets) != 1 or segments.drafts or segments.keep is not None:
        return False
    rows = np.asarray(segments.buckets[0].rows)
    return rows.size == tokens and bool((rows.ravel() == np.arange(tokens)).all())


def _products(
    case: RecurrentBlock | LatentInput, names: tuple[str, ...], weights: Weights, pool: Pool
) -> Callable[[Floats, Floats | None], tuple[Floats, Any]]:
    return Products(weights, names, norm_of(case.norm, "norm", weights), case.residual_scale, pool)


def _normed(
    case: RecurrentBlock, weights: Weights, pool: Pool
) -> Callable[[Floats, Floats | None], tuple[Floats, Any]]:
    """Return a function of residual and delta that gives their sum and its norm."""
    norm, plus = norm_of(case.norm, "norm", weights), add(None, pool)

    def run(residual: Floats, delta: Floats | None) -> tuple[Floats, Floats]:
        total = residual if delta is None else plus(residual, delta, case.residual_scale)
        if norm is None:
            return total, total
        x = empty(pool, *total.shape)
        norm(pool, total, x)
        return total, x

    return run


def latent_input(case: LatentInput, weights: Weights, pool: Pool) -> Callable[..., Any]:
    m = case.mixer
    first: Any = _products(case, ("q" if m.q_lora_rank is None else "q_a", "kv_a"), weights, pool)
    latent_norm = norm_of(m.latent_norm, "kv_a_norm", weights)
    second = None
    if m.q_lora_rank is not None:
        second = Products(weights, ("q_b",), norm_of(m.latent_norm, "q_a_norm", weights), 1.0, pool)
    assert latent_norm is not None

    def stage(
        residual: Floats, delta: Floats | None, rotary: Rotary | None, target: PageTarget | None = None
    ) -> tuple[Floats, Floats, Floats]:
        total, (q, kept) = first(residual, delta)
        if second:
            q = second(q)[1][0]
        latent = kept[:, : m.kv_lora_rank]
        latent_norm(pool, latent, latent)
        if m.latent_scale != 1.0:
            multiply(pool, latent, m.latent_scale, latent)
        if m.rope and rotary:
            cos, sin = np.asarray(rotary.cos), np.asarray(rotary.sin)
            rotate(pool, q, m.qk_head_dim, m.qk_nope_head_dim, m.rope.dim, m.rope.interleaved, cos, sin)
            rotate(pool, kept, m.row, m.kv_lora_rank, m.rope.dim, m.rope.interleaved, cos, sin)
        return total, q.reshape(len(q), m.num_heads, m.qk_head_dim), kept[:, None]

    return stage


BLOCKS: Mapping[Op[Any], Stage] = {
    api.RECURRENT_BLOCK: Stage(never, recurrent_block),
    api.LATENT_INPUT: Stage(never, latent_input),
}
