"""Attention over latents, dense and paged, in two forms that differ only by rounding. The cheaper one is used.

    rebuilt    keys and values of each head are computed from the latents, and attention is as usual
    absorbed   kv_b maps queries into the latents' space, and results out of it; all heads share one key, the stored
               row, and one value, its latent

In published models an absorbed key is three times as long as a rebuilt one, but needs no computation. So few queries
over a long context are absorbed, and long chunks rebuilt. `LatentAttention.absorbs` decides by a bucket's shape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from ridgeline.ops.api import Bucket, DenseRows, PagedRows
from ridgeline.ops.reference.paged import block_size, bucket_sees, key_positions, last_slots, parts_of
from ridgeline.ops.reference.stored import as_floats, read_pages
from ridgeline.spec import LatentAttention


class Context(NamedTuple):
    """The keys of n sequences and the positions of their queries. Keys that no query attends to are finite."""

    rows: Tensor  # [n, S, rank + rope]
    sees: Callable[[int, int], Tensor]  # first query and number of queries -> which keys they attend to, [n, b, S]


def latent_attention(case: LatentAttention):
    def attend(q: Tensor, kv: DenseRows, kv_b: Tensor) -> Tensor:
        outputs = []
        for queries, rows in zip(
            *(x.split(list(kv.lengths)) for x in (q, as_floats(kv.parts[0], q.dtype, kv.scales[0]))), strict=True
        ):
            keys_at = torch.arange(len(rows), device=q.device)[None]
            context = Context(rows[:, 0][None], partial(causal, keys_at))
            outputs.append(attend_in_form(case, queries[None], context, kv_b)[0])
        return torch.cat(outputs)

    return attend


def paged_latent_attention(case: LatentAttention):
    def attend(q: Tensor, kv: PagedRows, kv_b: Tensor) -> Tensor:
        (pages,) = kv.parts
        outputs = []
        for bucket in kv.layout.buckets:
            for part in parts_of(bucket, pages, max(case.num_heads, case.row)):
                out = attend_in_form(case, q[part.rows], gather(pages, part, q.dtype, kv.scales[0]), kv_b)
                outputs.append(out.flatten(0, 1))
        return torch.cat(outputs)[kv.layout.order]

    return attend


def gather(pages: Tensor, b: Bucket, dtype: torch.dtype, scale: float) -> Context:
    """Gather the keys of a bucket. Keys that no query attends to become 0: they may be NaN, and 0 x NaN is NaN."""
    keys_at, held = key_positions(b, pages.shape[1])
    used = held & (keys_at <= last_slots(b))
    rows = read_pages(pages, b.pages, dtype, scale).squeeze(2)  # [n, S, rank + rope], a copy
    rows.masked_fill_(~used[..., None], 0.0)
    return Context(rows, lambda at, count: bucket_sees(None, b, at, count, keys_at) & held[:, None])


def causal(keys_at: Tensor, at: int, count: int) -> Tensor:
    """Return which keys [n, S] some queries at the same positions attend to."""
    return keys_at[:, None] <= keys_at[:, at : at + count, None]


def attend_in_form(case: LatentAttention, q: Tensor, context: Context, kv_b: Tensor) -> Tensor:
    """Attend: q [n, m, H, nope + rope] -> [n, m, H * value], some heads at a time to bound memory."""
    n, m = q.shape[:2]
    size = context.rows.shape[1]
    absorbed = case.absorbs(m, size)
    made = m * (case.row + case.kv_lora_rank) if absorbed else size * (case.qk_head_dim + case.v_head_dim)
    heads = max(1, block_size(q) // max(n * made, kv_b[0].numel()))
    form = _absorbed if absorbed else _rebuilt
    parts = zip(q.split(heads, 2), kv_b.split(heads), strict=True)
    return torch.cat([form(case, queries, context, up.to(q.dtype)) for queries, up in parts], 2).flatten(2)


def _absorbed(case: LatentAttention, q: Tensor, context: Context, kv_b: Tensor) -> Tensor:
    """Attend over latents: q [n, m, h, nope + rope], kv_b [h, nope + value, rank] -> [n, m, h, value]."""
    still, rotated = q.split((case.qk_nope_head_dim, case.qk_rope_head_dim), -1)
    k_up, v_up = kv_b.split((case.qk_nope_head_dim, case.v_head_dim), 1)
    queries = torch.cat((torch.einsum("nmhd,hdr->nmhr", still, k_up), rotated), -1)
    latents = context.rows[..., : case.kv_lora_rank]
    outputs = []
    for at, block in _query_blocks(queries, context):
        # All heads have the same keys, so that their queries are one matrix, [n, m * h, rank + rope].
        scores = (block.flatten(1, 2) @ context.rows.mT).unflatten(1, block.shape[1:3])
        weights = _weights(case, scores, context, at)
        outputs.append((weights.flatten(1, 2) @ latents).unflatten(1, block.shape[1:3]))
    return torch.einsum("nmhr,hvr->nmhv", torch.cat(outputs, 1), v_up)


def _rebuilt(case: LatentAttention, q: Tensor, context: Context, kv_b: Tensor) -> Tensor:
    """Attend as `_absorbed` does, over keys [n, h, S, nope + rope] and values [n, h, S, value] out of the latents."""
    latents, rotated = context.rows.split((case.kv_lora_rank, case.qk_rope_head_dim), -1)
    made = torch.einsum("nsr,hdr->nhsd", latents, kv_b)
    still, values = made.split((case.qk_nope_head_dim, case.v_head_dim), -1)
    keys = torch.cat((still, rotated[:, None].expand(-1, q.shape[2], -1, -1)), -1)
    outputs = []
    for at, block in _query_blocks(q, context):
        weights = _weights(case, torch.einsum("nmhd,nhsd->nmhs", block, keys), context, at)
        outputs.append(torch.einsum("nmhs,nhsv->nmhv", weights, values))
    return torch.cat(outputs, 1)


def _query_blocks(q: Tensor, context: Context) -> Iterator[tuple[int, Tensor]]:
    """Yield blocks of q [n, m, h, d] whose scores are bounded, each with the index of its first query."""
    n, m, heads = q.shape[:3]
    step = max(1, block_size(q) // (n * heads * context.rows.shape[1]))
    yield from zip(range(0, m, step), q.split(step, 1), strict=True)


def _weights(case: LatentAttention, scores: Tensor, context: Context, at: int) -> Tensor:
    """Return the softmax of scores [n, b, h, S] over the keys of each query. The b queries begin at `at`."""
    seen = context.sees(at, scores.shape[1])
    return (scores * case.scale).masked_fill(~seen[:, :, None], -torch.inf).softmax(-1)
