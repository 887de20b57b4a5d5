"""Attention over whole sequences and over pages, and the write into pages; blocks bound the scores held at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from ridgeline.ops.api import Array, Bucket, DenseKeyValues, PagedKeyValues
from ridgeline.ops.host.memory import Ndarray
from ridgeline.ops.host.stored import as_floats, keys_of, latents_of, read_places, values_of, write_places
from ridgeline.spec import ALL, Attention, Dilated, FirstTokens, LatentAttention, Strided

# Scores of a layer that are held at once, and numbers of its keys and values: as many as stay in the cache. A single
# query, or a single sequence, may have more. plan.memory counts them.
BLOCK = 2**20


def attention(case: Attention) -> Callable[..., Ndarray]:
    def attend(q: Ndarray, kv: DenseKeyValues, sinks: Ndarray | None = None) -> Ndarray:
        keys, values = as_floats(np.asarray(kv.keys)), as_floats(np.asarray(kv.values))
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
    """One sequence: q [n, H, D], keys and values [n, K, D] -> out [n, H * D]."""
    n, place = len(q), np.arange(len(q))
    reach = n if case.window is None or case.pattern is not None else case.window
    step = max(1, BLOCK // (case.num_heads * min(n, 2 * reach)))
    for start in range(0, n, step):
        end, first = min(start + step, n), max(0, start - reach + 1)
        seen = sees(case, place[start:end, None], place[first:end])
        k, v = keys[None, first:end], values[None, first:end]
        out[start:end] = attend_block(case, q[None, start:end], k, v, seen[None], sinks)[0]


def attend_block(
    case: Attention, q: Ndarray, keys: Ndarray, values: Ndarray, seen: Ndarray, sinks: Ndarray | None
) -> Ndarray:
    """q [n, m, H, D], keys and values [n, S, K, D], seen [n, m, S] -> [n, m, H * D]."""
    n, m, heads, size = q.shape
    kv_heads = case.num_kv_heads
    shape = (n, kv_heads, m, heads // kv_heads)
    # Queries of one key head stand together: [n, K, m * G, D].
    queries = q.reshape(n, m, kv_heads, -1, size).transpose(0, 2, 1, 3, 4).reshape(n, kv_heads, -1, size)
    scores = queries @ keys.transpose(0, 2, 3, 1)
    scores *= case.scale
    if case.softcap:
        scores /= case.softcap
        np.tanh(scores, out=scores)
        scores *= case.softcap
    np.copyto(scores.reshape(*shape, -1), -np.inf, where=~seen[:, None, :, None])
    if sinks is not None:
        sinks = np.broadcast_to(sinks.reshape(kv_heads, 1, -1), shape).reshape(n, kv_heads, -1, 1)
    total = exponentials(scores, sinks)
    out = scores @ values.transpose(0, 2, 1, 3)
    out /= total
    return out.reshape(*shape, size).transpose(0, 2, 1, 3, 4).reshape(n, m, -1)


def exponentials(scores: Ndarray, sinks: Ndarray | None = None) -> Ndarray:
    """In place, the numerators of a softmax over the last axis; its denominators [..., 1].

    sinks: of each row a logit [..., 1] that takes part and is left out.
    """
    top = scores.max(-1, keepdims=True)
    if sinks is not None:
        top = np.maximum(top, sinks)
    scores -= top
    np.exp(scores, out=scores)
    total: Ndarray = scores.sum(-1, keepdims=True)
    return total if sinks is None else total + np.exp(sinks - top)


def sees(case: Attention, query: Ndarray, key: Ndarray) -> Ndarray:
    """Does the token at position `query` see the one at `key`? They broadcast. A window includes the query itself."""
    seen: Ndarray = key <= query
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
    seen &= near
    return seen


# ---- pages -----------------------------------------------------------------------------------------------------------


def write_pages(case: Attention | LatentAttention) -> Callable[..., None]:
    def write(pages: Sequence[Ndarray], parts: Sequence[Ndarray], write_page: Ndarray, write_slot: Ndarray) -> None:
        keys, values = parts
        write_places(keys_of(pages[0]), keys, write_page, write_slot, numbers_last=False)
        write_places(values_of(pages[1]), values, write_page, write_slot, numbers_last=True)

    def write_latents(
        pages: Sequence[Ndarray], parts: Sequence[Ndarray], write_page: Ndarray, write_slot: Ndarray
    ) -> None:
        write_places(latents_of(pages[0]), parts[0], write_page, write_slot, numbers_last=True)

    return write if isinstance(case, Attention) else write_latents


def paged_attention(case: Attention) -> Callable[..., Ndarray]:
    per_key = max(case.num_heads, case.num_kv_heads * case.head_dim)

    def attend(q: Ndarray, kv: PagedKeyValues, sinks: Ndarray | None = None) -> Ndarray:
        pages = np.asarray(kv.keys), np.asarray(kv.values)
        parts = (part for bucket in kv.layout.buckets for part in parts_of(bucket, pages[0].shape[1], per_key))
        outputs = [_attend_bucket(case, q, pages, sinks, part) for part in parts]
        return in_order(outputs, kv.layout.order)

    return attend


class BucketPart(NamedTuple):
    """Some sequences of a Bucket."""

    rows: Ndarray
    positions: Ndarray
    pages: Ndarray
    first: Ndarray


def in_order(outputs: list[Ndarray], order: Array) -> Ndarray:
    """[n * m, ...] of every bucket, as one array in the order of the step's tokens."""
    whole = outputs[0] if len(outputs) == 1 else np.concatenate(outputs)
    return np.take(whole, np.asarray(order), 0)


def parts_of(b: Bucket, page_tokens: int, per_key: int) -> Iterator[BucketPart]:
    """A bucket, as many sequences at a time as a block holds, at least one. per_key: numbers that a key makes at least.

    Sequences may share pages, but what is gathered from them they do not: all at once could be many times the pages.
    """
    whole = BucketPart(*map(np.asarray, b))
    pages = whole.pages
    step = max(1, BLOCK // (pages.shape[1] * page_tokens * per_key))
    for start in range(0, len(pages), step):
        yield BucketPart(*(x[start : start + step] for x in whole))


def _attend_bucket(
    case: Attention, q: Ndarray, pages: tuple[Ndarray, Ndarray], sinks: Ndarray | None, b: BucketPart
) -> Ndarray:
    """All queries of a bucket: [n * m, H * D], in blocks that bound the scores held at once."""
    place, held = key_places(b, pages[0].shape[1])
    keys = read_places(keys_of(pages[0]), b.pages, numbers_last=False)  # [n, S, K, D]
    values = read_places(values_of(pages[1]), b.pages, numbers_last=True)
    # What no query sees may be anything, NaN included: a weight of zero would not silence it. Queries are neighbors,
    # so between the first one's oldest key and the last one's own place every key is seen by one of them, or left out
    # by a pattern of a span that is kept whole.
    used, state = held & (place <= b.positions[:, -1:]), case.state()
    if state.lookback != ALL:
        used &= (place >= b.positions[:, :1] - state.lookback) | (place < state.first_tokens)
    values[~used] = 0.0
    step = max(1, BLOCK // (len(b.rows) * case.num_heads * place.shape[1]))
    blocks = []
    for at in range(0, b.rows.shape[1], step):
        some = slice(at, at + step)
        seen = sees(case, b.positions[:, some, None], place[:, None])  # [n, block, S]
        seen &= held[:, None]
        blocks.append(attend_block(case, q[b.rows[:, some]], keys, values, seen, sinks))
    out = blocks[0] if len(blocks) == 1 else np.concatenate(blocks, 1)
    return out.reshape(-1, out.shape[-1])


def key_places(b: BucketPart, page_tokens: int) -> tuple[Ndarray, Ndarray]:
    """The position in its sequence of every key of a bucket's pages [n, S], and whether there is a page at all."""
    place = b.first[:, :, None] + np.arange(page_tokens)
    return place.reshape(len(place), -1), np.repeat(b.pages != 0, page_tokens, 1)
