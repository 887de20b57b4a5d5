"""Attention over pages, and the write into them. No loop over sequences: one over buckets of like shapes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ridgeline.ops.api import Bucket, BucketTree, PagedKeyValues
from ridgeline.ops.reference.primitives import fall, sees, softmax
from ridgeline.ops.reference.stored import planes, read_pages
from ridgeline.ops.reference.stored import write_pages as write_rows
from ridgeline.spec import ALL, Attention, LatentAttention
from ridgeline.spec.sight import CAUSAL
from ridgeline.spec.storage import UNSCALED, KVScales
from ridgeline.spec.trees import MOST_DRAFTS

# Limit of the scores, and of the numbers of keys and values, that one block holds: what fits into a CPU's cache, or
# keeps a GPU busy. A single query or sequence may exceed it. cost.memory counts these bytes.
CPU_BLOCK, GPU_BLOCK = 2**20, 2**25


def write_pages(case: Attention | LatentAttention):
    def write(
        pages: Sequence[Tensor], parts: Sequence[Tensor], write_page: Tensor, write_slot: Tensor,
        scales: KVScales = UNSCALED,
    ) -> None:  # fmt: skip
        for view, x, scale in zip(pages, parts, scales, strict=False):  # latents are one part
            write_rows(view, x, write_page, write_slot, scale)

    return write


def move_rows(case: Attention | LatentAttention):
    def move(pages: Sequence[Tensor], from_page: Tensor, from_slot: Tensor, to_page: Tensor, to_slot: Tensor) -> None:
        for part in pages:
            for view in planes(part) if part.dtype == torch.int8 else (part,):
                view[to_page, to_slot] = view[from_page, from_slot]

    return move


def paged_attention(case: Attention):
    def attend(q: Tensor, kv: PagedKeyValues, sinks: Tensor | None = None) -> Tensor:
        per_key = max(case.num_heads, case.num_kv_heads * case.head_dim)
        parts = (part for bucket in kv.layout.buckets for part in parts_of(bucket, kv.keys, per_key))
        return torch.cat([_attend_bucket(case, q, kv, sinks, part) for part in parts])[kv.layout.order]

    return attend


def block_size(x: Tensor) -> int:
    """Return the numbers that one block may hold on the device of `x`."""
    return CPU_BLOCK if x.device.type == "cpu" else GPU_BLOCK


def parts_of(b: Bucket, pages: Tensor, per_key: int) -> Iterator[Bucket]:
    """Yield a bucket in parts of as many sequences as a block holds, at least one.

    Sequences may share pages, but each gets a copy of their rows: all copies at once could be many times the pages.

    per_key: least number of values that are computed for each key.
    """
    keys = b.pages.shape[1] * pages.shape[1]
    size = block_size(pages) // (keys * per_key)
    parts = zip(*(x.split(max(1, size)) for x in (*b[:4], *(b.tree or ()))), strict=True)
    for rows, positions, pages_of, first, *tree in parts:
        yield Bucket(rows, positions, pages_of, first, BucketTree(*tree) if tree else None)


def last_slots(b: Bucket) -> Tensor:
    """Return the slot of the last query of each sequence, [n, 1]."""
    return b.positions[:, -1:] if b.tree is None else b.tree.ends - 1


def positions_of(b: Bucket, keys_at: Tensor) -> Tensor:
    """Return the positions of keys in their sequences, [n, S]. keys_at: their slots, [n, S]. They differ in trees."""
    if (tree := b.tree) is None:
        return keys_at
    drafts = (keys_at - tree.limits).clamp(0, MOST_DRAFTS)
    return torch.where(keys_at < tree.limits, keys_at, tree.positions.gather(1, drafts))


def bucket_sees(case: Attention | None, b: Bucket, at: int, count: int, keys_at: Tensor) -> Tensor:
    """Return which keys `count` of a bucket's queries, from `at` on, attend to: [n, block, S].

    case: None for latents, which see all. keys_at: slots of the keys, [n, S].
    """
    queries, tree = b.positions[:, at : at + count, None], b.tree
    if tree is None:
        return keys_at[:, None] <= queries if case is None else sees(case, queries, keys_at[:, None])
    drafts = (keys_at - tree.limits).clamp(0, MOST_DRAFTS)
    known = keys_at < tree.limits
    positions = positions_of(b, keys_at)[:, None]
    on_path = (tree.paths[:, at : at + count, None] >> drafts[:, None] & 1).bool()
    return (known[:, None] | on_path) & (positions <= queries if case is None else sees(case, queries, positions))


def _attend_bucket(case: Attention, q: Tensor, kv: PagedKeyValues, sinks: Tensor | None, b: Bucket) -> Tensor:
    """Attend with all queries of a bucket, in blocks that bound memory: [n * m, H * D]."""
    # [n, K, S, D]
    keys, values = (
        read_pages(x, b.pages, q.dtype, scale).transpose(1, 2) for x, scale in zip(kv[:2], kv.scales, strict=True)
    )
    keys_at, held = key_positions(b, kv.keys.shape[1])
    # Values that no query attends to may be NaN, and 0 x NaN is NaN: they become 0. Queries are consecutive, so every
    # key from the first query's oldest one to the last query's own is used by one of them, or excluded by a pattern
    # within a span whose pages are kept.
    used, state = held & (keys_at <= last_slots(b)), case.state()
    if state.lookback != ALL:
        used &= (keys_at >= b.positions[:, :1] - state.lookback) | (keys_at < state.first_tokens)
    values.masked_fill_(~used[:, None, :, None], 0.0)  # a copy already
    seen_held = held if case.sight == CAUSAL else used  # a block may end after the last query
    step = max(1, block_size(q) // (b.rows.shape[0] * case.num_heads * keys_at.shape[1]))
    blocks = []
    for at, rows in zip(range(0, b.rows.shape[1], step), b.rows.split(step, 1), strict=True):
        seen = bucket_sees(case, b, at, rows.shape[1], keys_at) & seen_held[:, None]  # [n, block, S]
        queries = b.positions[:, at : at + rows.shape[1], None]
        away = None if case.alibi is None else queries - positions_of(b, keys_at)[:, None]
        blocks.append(_attend(case, q[rows], keys, values, seen, sinks, away))
    return torch.cat(blocks, 1).flatten(0, 1)


def _attend(
    case: Attention, q: Tensor, keys: Tensor, values: Tensor, seen: Tensor, sinks: Tensor | None, away: Tensor | None
) -> Tensor:
    """Attend with q [n, m, H, D] to keys and values [n, K, S, D], seen [n, m, S] -> [n, m, H * D].

    away: distances of keys before queries [n, m, S], where scores fall with them.
    """
    n, m = q.shape[:2]
    groups = case.num_heads // case.num_kv_heads
    # Group the queries by their key head: [n, K, m * G, D].
    queries = q.unflatten(2, (case.num_kv_heads, groups)).permute(0, 2, 1, 3, 4).flatten(2, 3)
    scores = queries @ keys.transpose(2, 3) * case.scale
    if case.softcap:
        scores = case.softcap * torch.tanh(scores / case.softcap)
    if away is not None:
        slopes = fall(case, q).view(1, case.num_kv_heads, 1, groups, 1)
        scores = scores - (slopes * away[:, None, :, None]).flatten(2, 3)
    hidden = ~seen[:, None, :, None].expand(n, 1, m, groups, -1).flatten(2, 3)
    if sinks is not None:
        sinks = sinks.view(case.num_kv_heads, 1, groups).expand(-1, m, -1).flatten(1)  # [K, m * G]
    scores = scores.masked_fill(hidden, -torch.inf)
    weights = softmax(scores, sinks)
    out = (weights @ values).unflatten(2, (m, groups)).permute(0, 2, 1, 3, 4)  # [n, m, K, G, D]
    return out.reshape(n, m, -1)


def key_positions(b: Bucket, page_tokens: int) -> tuple[Tensor, Tensor]:
    """Return the slot of every key of a bucket's pages in its sequence [n, S], and whether its page exists."""
    keys_at = b.first[:, :, None] + torch.arange(page_tokens, device=b.pages.device)
    return keys_at.flatten(1), (b.pages != 0).repeat_interleave(page_tokens, 1)
