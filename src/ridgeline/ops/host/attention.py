"""Attention over whole sequences and over pages, in blocks that bound memory, and writes into pages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from ridgeline.ops.api import Array, Bucket, BucketTree, DenseKeyValues, PagedKeyValues
from ridgeline.ops.host.memory import Ndarray
from ridgeline.ops.host.stored import as_floats, keys_of, latents_of, read_rows, values_of, write_rows
from ridgeline.spec import ALL, Attention, Chunked, Dilated, FirstTokens, LatentAttention, Strided
from ridgeline.spec.sight import CAUSAL
from ridgeline.spec.storage import UNSCALED, KVScales
from ridgeline.spec.trees import MOST_DRAFTS

# Limit of the scores, and of the numbers of keys and values, that one block holds: what fits into the cache. A single
# query or sequence may exceed it. cost.memory counts these bytes.
BLOCK = 2**20


def attention(case: Attention) -> Callable[..., Ndarray]:
    def attend(q: Ndarray, kv: DenseKeyValues, sinks: Ndarray | None = None) -> Ndarray:
        keys, values = (as_floats(np.asarray(x), s) for x, s in zip(kv[:2], kv.scales, strict=True))
        out = np.empty((len(q), case.num_heads * case.head_dim), q.dtype)
        start = 0
        for n in kv.lengths:
            rows = slice(start, start + n)
            _attend_sequence(case, q[rows], keys[rows], values[rows], sinks, out[rows])
            start += n
        return out

    return attend


def _attend_sequence(
    case: Attention, q: Ndarray, keys: Ndarray, values: Ndarray, sinks: Ndarray | None, out: Ndarray
) -> None:
    """Attend within one sequence: q [n, H, D], keys and values [n, K, D] -> out [n, H * D]."""
    n, keys_at = len(q), np.arange(len(q))
    reach = n if case.window is None or case.pattern is not None else case.window
    step = max(1, BLOCK // (case.num_heads * min(n, 2 * reach)))
    for start in range(0, n, step):
        end, first = min(start + step, n), max(0, start - reach + 1)
        last = end if case.sight == CAUSAL else n
        seen = sees(case, keys_at[start:end, None], keys_at[first:last])
        k, v = keys[None, first:last], values[None, first:last]
        away = None if case.alibi is None else keys_at[None, start:end, None] - keys_at[first:last]
        out[start:end] = attend_block(case, q[None, start:end], k, v, seen[None], sinks, away)[0]


def attend_block(
    case: Attention,
    q: Ndarray,
    keys: Ndarray,
    values: Ndarray,
    seen: Ndarray,
    sinks: Ndarray | None,
    away: Ndarray | None,
) -> Ndarray:
    """Attend with q [n, m, H, D] to keys and values [n, S, K, D], seen [n, m, S] -> [n, m, H * D].

    away: distances of keys before queries [n, m, S], where scores fall with them.
    """
    n, m, heads, size = q.shape
    kv_heads = case.num_kv_heads
    shape = (n, kv_heads, m, heads // kv_heads)
    # Group the queries by their key head: [n, K, m * G, D].
    queries = q.reshape(n, m, kv_heads, -1, size).transpose(0, 2, 1, 3, 4).reshape(n, kv_heads, -1, size)
    scores = queries @ keys.transpose(0, 2, 3, 1)
    scores *= case.scale
    if case.softcap:
        scores /= case.softcap
        np.tanh(scores, out=scores)
        scores *= case.softcap
    if away is not None:
        slopes = np.array(case.slopes, scores.dtype).reshape(1, kv_heads, 1, -1, 1)
        scores.reshape(*shape, -1)[...] -= slopes * away[:, None, :, None]
    np.copyto(scores.reshape(*shape, -1), -np.inf, where=~seen[:, None, :, None])
    if sinks is not None:
        sinks = np.broadcast_to(sinks.reshape(kv_heads, 1, -1), shape).reshape(n, kv_heads, -1, 1)
    total = exponentials(scores, sinks)
    out = scores @ values.transpose(0, 2, 1, 3)
    out /= total
    return out.reshape(*shape, size).transpose(0, 2, 1, 3, 4).reshape(n, m, -1)


def exponentials(scores: Ndarray, sinks: Ndarray | None = None) -> Ndarray:
    """Turn scores into the numerators of a softmax over the last axis, in keys_at. Return the denominators [..., 1].

    sinks: a logit for each row, [..., 1], that counts in the denominator alone.
    """
    top = scores.max(-1, keepdims=True)
    if sinks is not None:
        top = np.maximum(top, sinks)
    scores -= top
    np.exp(scores, out=scores)
    total: Ndarray = scores.sum(-1, keepdims=True)
    return total if sinks is None else total + np.exp(sinks - top)


def sees(case: Attention, query: Ndarray, key: Ndarray) -> Ndarray:
    """Return whether the token at position `query` attends to the one at `key`; both broadcast. A window includes the
    query itself."""
    seen: Ndarray = key <= case.sight.last(query)
    if case.window is None:
        return seen
    near = key > query - case.window
    match case.pattern:
        case FirstTokens(count):
            near |= key < count
        case Dilated(step):
            near = (key > query - case.window * step) & ((query - key) % step == 0)
        case Strided(stride):
            near |= (query - key) % stride == 0
        case Chunked():
            near = key >= query - query % case.window
    seen &= near
    return seen


# ---- pages -----------------------------------------------------------------------------------------------------------


def write_pages(case: Attention | LatentAttention) -> Callable[..., None]:
    def write(
        pages: Sequence[Ndarray], parts: Sequence[Ndarray], write_page: Ndarray, write_slot: Ndarray,
        scales: KVScales = UNSCALED,
    ) -> None:  # fmt: skip
        keys, values = parts
        write_rows(keys_of(pages[0]), keys, write_page, write_slot, False, scales[0])
        write_rows(values_of(pages[1]), values, write_page, write_slot, True, scales[1])

    def write_latents(
        pages: Sequence[Ndarray], parts: Sequence[Ndarray], write_page: Ndarray, write_slot: Ndarray,
        scales: KVScales = UNSCALED,
    ) -> None:  # fmt: skip
        for view, x, scale in zip(pages, parts, scales, strict=False):
            write_rows(latents_of(view), x, write_page, write_slot, True, scale)

    return write if isinstance(case, Attention) else write_latents


def move_rows(case: Attention | LatentAttention) -> Callable[..., None]:
    def move(
        pages: Sequence[Ndarray], from_page: Ndarray, from_slot: Ndarray, to_page: Ndarray, to_slot: Ndarray
    ) -> None:
        for i, part in enumerate(pages):
            numbers, scales = keys_of(part) if i == 0 and isinstance(case, Attention) else values_of(part)
            slots = numbers.swapaxes(2, 3) if i == 0 and isinstance(case, Attention) else numbers
            slots[to_page, :, to_slot] = slots[from_page, :, from_slot]
            if scales is not None:
                scales[to_page, :, to_slot] = scales[from_page, :, from_slot]

    return move


def paged_attention(case: Attention) -> Callable[..., Ndarray]:
    per_key = max(case.num_heads, case.num_kv_heads * case.head_dim)

    def attend(q: Ndarray, kv: PagedKeyValues, sinks: Ndarray | None = None) -> Ndarray:
        pages = np.asarray(kv.keys), np.asarray(kv.values)
        parts = (part for bucket in kv.layout.buckets for part in parts_of(bucket, pages[0].shape[1], per_key))
        outputs = [_attend_bucket(case, q, pages, kv.scales, sinks, part) for part in parts]
        return in_order(outputs, kv.layout.order)

    return attend


class BucketPart(NamedTuple):
    """Some of the sequences of a Bucket."""

    rows: Ndarray
    positions: Ndarray
    pages: Ndarray
    first: Ndarray
    tree: BucketTree | None


def in_order(outputs: list[Ndarray], order: Array) -> Ndarray:
    """Join the results [n * m, ...] of all buckets in the order of the step's tokens."""
    whole = outputs[0] if len(outputs) == 1 else np.concatenate(outputs)
    return np.take(whole, np.asarray(order), 0)


def parts_of(b: Bucket, page_tokens: int, per_key: int) -> Iterator[BucketPart]:
    """Yield a bucket in parts of as many sequences as a block holds, at least one.

    Sequences may share pages, but each gets a copy of their rows: all copies at once could be many times the pages.

    per_key: least number of values that are computed for each key.
    """
    rows, positions, pages, first = (np.asarray(x) for x in b[:4])
    step = max(1, BLOCK // (pages.shape[1] * page_tokens * per_key))
    for start in range(0, len(pages), step):
        some = slice(start, start + step)
        tree = None if b.tree is None else BucketTree(*(np.asarray(x)[some] for x in b.tree))
        yield BucketPart(rows[some], positions[some], pages[some], first[some], tree)


def _attend_bucket(
    case: Attention, q: Ndarray, pages: tuple[Ndarray, Ndarray], scales: KVScales, sinks: Ndarray | None, b: BucketPart
) -> Ndarray:
    """Attend with all queries of a bucket, in blocks that bound memory: [n * m, H * D]."""
    keys_at, held = key_positions(b, pages[0].shape[1])
    keys = read_rows(keys_of(pages[0]), b.pages, False, scales[0])  # [n, S, K, D]
    values = read_rows(values_of(pages[1]), b.pages, True, scales[1])
    # Values that no query attends to may be NaN, and 0 x NaN is NaN: they become 0. Queries are consecutive, so every
    # key from the first query's oldest one to the last query's own is used by one of them, or excluded by a pattern
    # within a span whose pages are kept.
    used, state = held & (keys_at <= last_slots(b)), case.state()
    if state.lookback != ALL:
        used &= (keys_at >= b.positions[:, :1] - state.lookback) | (keys_at < state.first_tokens)
    values[~used] = 0.0
    seen_held = held if case.sight == CAUSAL else used  # a block may end after the last query
    step = max(1, BLOCK // (len(b.rows) * case.num_heads * keys_at.shape[1]))
    blocks = []
    for at in range(0, b.rows.shape[1], step):
        some = slice(at, at + step)
        seen = bucket_sees(case, b, some, keys_at)  # [n, block, S]
        seen &= seen_held[:, None]
        away = None if case.alibi is None else b.positions[:, some, None] - positions_of(b, keys_at)[:, None]
        blocks.append(attend_block(case, q[b.rows[:, some]], keys, values, seen, sinks, away))
    out = blocks[0] if len(blocks) == 1 else np.concatenate(blocks, 1)
    return out.reshape(-1, out.shape[-1])


def last_slots(b: BucketPart) -> Ndarray:
    """Return the slot of the last query of each sequence, [n, 1]."""
    last: Ndarray = b.positions[:, -1:] if b.tree is None else np.asarray(b.tree.ends) - 1
    return last


def positions_of(b: BucketPart, keys_at: Ndarray) -> Ndarray:
    """Return the positions of keys in their sequences, [n, S]. keys_at: their slots, [n, S]. They differ in trees."""
    if (tree := b.tree) is None:
        return keys_at
    limits = np.asarray(tree.limits)
    drafts = np.clip(keys_at - limits, 0, MOST_DRAFTS)
    return np.where(keys_at < limits, keys_at, np.take_along_axis(np.asarray(tree.positions), drafts, 1))


def bucket_sees(case: Attention | None, b: BucketPart, some: slice, keys_at: Ndarray) -> Ndarray:
    """Return which keys some of a bucket's queries attend to, [n, block, S]. case: None for latents, which see all.

    keys_at: slots of the keys, [n, S].
    """
    queries, tree = b.positions[:, some, None], b.tree
    if tree is None:
        return keys_at[:, None] <= queries if case is None else sees(case, queries, keys_at[:, None])
    limits, paths = np.asarray(tree.limits), np.asarray(tree.paths)
    drafts, at = np.clip(keys_at - limits, 0, MOST_DRAFTS), positions_of(b, keys_at)[:, None]
    on_path = ((paths[:, some, None] >> drafts[:, None]) & 1).astype(bool)
    seen: Ndarray = (keys_at < limits)[:, None] | on_path
    seen &= at <= queries if case is None else sees(case, queries, at)
    return seen


def key_positions(b: BucketPart, page_tokens: int) -> tuple[Ndarray, Ndarray]:
    """Return the slot of every key of a bucket's pages in its sequence [n, S], and whether its page exists."""
    keys_at = b.first[:, :, None] + np.arange(page_tokens)
    return keys_at.reshape(len(keys_at), -1), np.repeat(b.pages != 0, page_tokens, 1)
