"""Attention over latents, dense and paged, in two forms (see ops/reference/latent.py). Shapes decide the form."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import numpy as np

from ridgeline.ops.api import DenseRows, PagedRows
from ridgeline.ops.host.attention import (
    BLOCK,
    BucketPart,
    bucket_sees,
    exponentials,
    in_order,
    key_positions,
    last_slots,
    parts_of,
)
from ridgeline.ops.host.memory import Ndarray, widen
from ridgeline.ops.host.stored import as_floats, latents_of, read_rows
from ridgeline.spec import LatentAttention


class Context(NamedTuple):
    """The keys of n sequences and the positions of their queries. Keys that no query attends to are finite."""

    rows: Ndarray  # [n, S, rank + rope]
    sees: Callable[[slice], Ndarray]  # some queries -> which keys they attend to, [n, block, S]


def latent_attention(case: LatentAttention) -> Callable[[Ndarray, DenseRows, Ndarray], Ndarray]:
    def attend(q: Ndarray, kv: DenseRows, kv_b: Ndarray) -> Ndarray:
        latents = as_floats(np.asarray(kv.parts[0]), kv.scales[0])
        outputs, start = [], 0
        for n in kv.lengths:
            keys_at = np.arange(n)[None]
            context = Context(latents[None, start : start + n, 0], partial(causal, keys_at))
            outputs.append(attend_in_form(case, q[None, start : start + n], context, kv_b)[0])
            start += n
        return np.concatenate(outputs)

    return attend


def paged_latent_attention(case: LatentAttention) -> Callable[[Ndarray, PagedRows, Ndarray], Ndarray]:
    def attend(q: Ndarray, kv: PagedRows, kv_b: Ndarray) -> Ndarray:
        pages = np.asarray(kv.parts[0])
        outputs = []
        for bucket in kv.layout.buckets:
            for part in parts_of(bucket, pages.shape[1], max(case.num_heads, case.row)):
                out = attend_in_form(case, q[part.rows], gather(pages, part, kv.scales[0]), kv_b)
                outputs.append(out.reshape(-1, out.shape[-1]))
        return in_order(outputs, kv.layout.order)

    return attend


def gather(pages: Ndarray, b: BucketPart, scale: float) -> Context:
    """Gather the keys of a bucket. Keys that no query attends to become 0: they may be NaN, and 0 x NaN is NaN."""
    keys_at, held = key_positions(b, pages.shape[1])
    rows = read_rows(latents_of(pages), b.pages, True, scale)[:, :, 0]  # a copy, [n, S, rank + rope]
    rows[~(held & (keys_at <= last_slots(b)))] = 0.0
    return Context(rows, lambda at: bucket_sees(None, b, at, keys_at) & held[:, None])


def causal(keys_at: Ndarray, at: slice) -> Ndarray:
    """Return which keys [n, S] some queries at the same positions attend to."""
    seen: Ndarray = keys_at[:, None] <= keys_at[:, at, None]
    return seen


def attend_in_form(case: LatentAttention, q: Ndarray, context: Context, kv_b: Ndarray) -> Ndarray:
    """Attend: q [n, m, H, nope + rope] -> [n, m, H * value], some heads at a time to bound memory."""
    n, m, num_heads = q.shape[:3]
    size = context.rows.shape[1]
    absorbed = case.absorbs(m, size)
    made = m * (case.row + case.kv_lora_rank) if absorbed else size * (case.qk_head_dim + case.v_head_dim)
    step = max(1, BLOCK // max(n * made, kv_b[0].size))
    form = _absorbed if absorbed else _rebuilt
    out = np.empty((n, m, num_heads, case.v_head_dim), q.dtype)
    for at in range(0, num_heads, step):
        heads = slice(at, at + step)
        out[:, :, heads] = form(case, q[:, :, heads], context, widen(kv_b[heads]).astype(q.dtype, copy=False))
    return out.reshape(n, m, -1)


def _absorbed(case: LatentAttention, q: Ndarray, context: Context, kv_b: Ndarray) -> Ndarray:
    """Attend over latents: q [n, m, h, nope + rope], kv_b [h, nope + value, rank] -> [n, m, h, value]."""
    n, m, heads = q.shape[:3]
    rank = case.kv_lora_rank
    k_up, v_up = kv_b[:, : case.qk_nope_head_dim], kv_b[:, case.qk_nope_head_dim :]
    queries = np.empty((n, m, heads, case.row), q.dtype)
    still = q[..., : case.qk_nope_head_dim].reshape(n * m, heads, -1).transpose(1, 0, 2)
    queries[..., :rank] = (still @ k_up).transpose(1, 0, 2).reshape(n, m, heads, rank)
    queries[..., rank:] = q[..., case.qk_nope_head_dim :]
    seen_latents = np.empty((n, m, heads, rank), q.dtype)
    for at in _query_blocks(queries, context):
        # All heads have the same keys, so that their queries are one matrix, [n, block * h, rank + rope].
        block = queries[:, at]
        scores = block.reshape(n, -1, case.row) @ context.rows.transpose(0, 2, 1)
        total = _numerators(case, scores.reshape(n, -1, heads, scores.shape[-1]), context, at)
        attended = (scores @ context.rows[..., :rank]).reshape(n, -1, heads, rank)
        np.divide(attended, total, out=seen_latents[:, at])
    out = seen_latents.reshape(n * m, heads, rank).transpose(1, 0, 2) @ v_up.transpose(0, 2, 1)
    return out.transpose(1, 0, 2).reshape(n, m, heads, -1)


def _rebuilt(case: LatentAttention, q: Ndarray, context: Context, kv_b: Ndarray) -> Ndarray:
    """Attend as `_absorbed` does, over keys [n, h, S, nope + rope] and values [n, h, S, value] out of the latents."""
    n, m, heads = q.shape[:3]
    rank, nope = case.kv_lora_rank, case.qk_nope_head_dim
    made = context.rows[:, None, :, :rank] @ kv_b.transpose(0, 2, 1)  # [n, h, S, nope + value]
    keys = np.empty((*made.shape[:3], case.qk_head_dim), q.dtype)
    keys[..., :nope], keys[..., nope:] = made[..., :nope], context.rows[:, None, :, rank:]
    values, out = made[..., nope:], np.empty((n, m, heads, case.v_head_dim), q.dtype)
    for at in _query_blocks(q, context):
        scores = q[:, at].transpose(0, 2, 1, 3) @ keys.transpose(0, 1, 3, 2)  # [n, h, block, S]
        total = _numerators(case, scores.transpose(0, 2, 1, 3), context, at)
        out[:, at] = (scores @ values).transpose(0, 2, 1, 3) / total
    return out


def _query_blocks(q: Ndarray, context: Context) -> Iterator[slice]:
    """Yield slices of the queries [n, m, h, d] whose scores fit into a block."""
    n, m, heads = q.shape[:3]
    step = max(1, BLOCK // (n * heads * context.rows.shape[1]))
    yield from (slice(at, min(at + step, m)) for at in range(0, m, step))


def _numerators(case: LatentAttention, scores: Ndarray, context: Context, at: slice) -> Ndarray:
    """Turn scores [n, block, h, S] into the numerators of a softmax over the keys of each query, in keys_at.

    Return the denominators [n, block, h, 1].
    """
    scores *= case.scale
    np.copyto(scores, -np.inf, where=~context.sees(at)[:, :, None])
    return exponentials(scores)
