"""Select keys by an indexer, and attend over them, in numpy: see ops/reference/indexed.py."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ridgeline.ops.api import DenseRows, PagedRows, Selection
from ridgeline.ops.host.attention import bucket_sees, in_order, key_positions, last_slots, parts_of
from ridgeline.ops.host.latent import Context, attend_in_form, causal, gather
from ridgeline.ops.host.memory import Ndarray
from ridgeline.ops.host.stored import as_floats, latents_of, read_rows
from ridgeline.spec import IndexedAttention

Found = list[tuple[Ndarray, Ndarray]]


def select_keys(case: IndexedAttention) -> Callable[[Ndarray, Ndarray, DenseRows | PagedRows], Selection]:
    top, size = case.indexer.top_k, max(case.indexer.num_heads, case.indexer.head_dim)

    def select(q: Ndarray, weights: Ndarray, rows: DenseRows | PagedRows) -> Selection:
        found: Found = []
        if isinstance(rows, DenseRows):
            keys, start = as_floats(np.asarray(rows.parts[1]), rows.scales[1]), 0
            for n in rows.lengths:
                some, at = slice(start, start + n), np.arange(n)[None]
                found.append(
                    _best(top, q[None, some], weights[None, some], keys[None, some, 0], causal(at, slice(0, n)))
                )
                start += n
            return Selection(*_joined(found))
        pages = np.asarray(rows.parts[1])
        for bucket in rows.layout.buckets:
            for part in parts_of(bucket, pages.shape[1], size):
                keys_at, held = key_positions(part, pages.shape[1])
                keys = read_rows(latents_of(pages), part.pages, True, rows.scales[1])[:, :, 0]
                keys[~(held & (keys_at <= last_slots(part)))] = 0.0
                seen = bucket_sees(None, part, slice(None), keys_at) & held[:, None]
                found.append(_best(top, q[part.rows], weights[part.rows], keys, seen))
        ids, counts = _joined(found)
        return Selection(in_order([ids], rows.layout.order), in_order([counts], rows.layout.order))

    return select


def _best(top: int, q: Ndarray, weights: Ndarray, keys: Ndarray, seen: Ndarray) -> tuple[Ndarray, Ndarray]:
    """Return the choice of q [n, m, H, D] among keys [n, S, D]: ids [n * m, k], ascending, then S; and counts [n * m].

    seen: [n, m, S]. The keys of a sequence are in the order of its slots, from slot 0 on.
    """
    n, m, heads = q.shape[:3]
    size = keys.shape[1]
    dots = (q.reshape(n, m * heads, -1) @ keys.transpose(0, 2, 1)).reshape(n, m, heads, size)
    scores = (weights[:, :, None] @ np.maximum(dots, 0.0))[:, :, 0]
    ranks = np.where(seen, np.where(np.isnan(scores), -np.inf, -scores), np.inf)
    order = ranks.argsort(-1, kind="stable")[..., :top]
    valid = np.take_along_axis(np.broadcast_to(seen, (n, m, size)), order, -1)
    ids = np.sort(np.where(valid, order, size), -1).reshape(n * m, -1)
    return ids, (ids < size).sum(-1)


def _joined(found: Found) -> tuple[Ndarray, Ndarray]:
    most = max(ids.shape[1] for ids, _ in found)
    padded = [np.pad(ids, ((0, 0), (0, most - ids.shape[1]))) for ids, _ in found]
    return np.concatenate(padded), np.concatenate([counts for _, counts in found])


def indexed_attention(
    case: IndexedAttention,
) -> Callable[[Ndarray, DenseRows | PagedRows, Ndarray, Selection], Ndarray]:
    m = case.latent

    def attend(q: Ndarray, rows: DenseRows | PagedRows, kv_b: Ndarray, chosen: Selection) -> Ndarray:
        ids, counts, outputs = np.asarray(chosen.ids), np.asarray(chosen.counts), []
        if isinstance(rows, DenseRows):
            latents, start = as_floats(np.asarray(rows.parts[0]), rows.scales[0]), 0
            for n in rows.lengths:
                some = slice(start, start + n)
                context = Context(latents[None, some, 0], _of(_mask(ids[None, some], counts[None, some], n)))
                outputs.append(attend_in_form(m, q[None, some], context, kv_b)[0])
                start += n
            return np.concatenate(outputs)
        pages = np.asarray(rows.parts[0])
        for bucket in rows.layout.buckets:
            for part in parts_of(bucket, pages.shape[1], max(m.num_heads, m.row)):
                keys = gather(pages, part, rows.scales[0]).rows
                mask = _mask(ids[part.rows], counts[part.rows], keys.shape[1])
                out = attend_in_form(m, q[part.rows], Context(keys, _of(mask)), kv_b)
                outputs.append(out.reshape(-1, out.shape[-1]))
        return in_order(outputs, rows.layout.order)

    return attend


def _mask(ids: Ndarray, counts: Ndarray, size: int) -> Ndarray:
    """Return which of `size` keys are chosen, [n, m, size]. ids: [n, m, k], of which `counts` [n, m] are valid."""
    mask = np.zeros((*ids.shape[:2], size + 1), bool)
    np.put_along_axis(mask, np.where(np.arange(ids.shape[-1]) < counts[..., None], ids, size), True, -1)
    return mask[..., :size]


def _of(mask: Ndarray) -> Callable[[slice], Ndarray]:
    return lambda at: mask[:, at]
