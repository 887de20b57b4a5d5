"""Select keys by an indexer, and attend over them: the definition. A choice becomes a mask over all keys."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ridgeline.ops.api import DenseRows, PagedRows, Selection
from ridgeline.ops.reference.latent import Context, attend_in_form, causal, gather
from ridgeline.ops.reference.paged import bucket_sees, key_positions, last_slots, parts_of
from ridgeline.ops.reference.stored import as_floats, read_pages
from ridgeline.spec import IndexedAttention


def select_keys(case: IndexedAttention):
    top, heads = case.indexer.top_k, case.indexer.num_heads

    def select(q: Tensor, weights: Tensor, rows: DenseRows | PagedRows) -> Selection:
        found: list[tuple[Tensor, Tensor]] = []
        if isinstance(rows, DenseRows):
            keys, start = as_floats(rows.parts[1], q.dtype, rows.scales[1]), 0
            for n in rows.lengths:
                some, at = slice(start, start + n), torch.arange(n, device=q.device)[None]
                found.append(_best(top, q[None, some], weights[None, some], keys[None, some, 0], causal(at, 0, n)))
                start += n
            return _joined(found)
        pages = rows.parts[1]
        for bucket in rows.layout.buckets:
            for part in parts_of(bucket, pages, max(heads, case.indexer.head_dim)):
                keys_at, held = key_positions(part, pages.shape[1])
                keys = read_pages(pages, part.pages, q.dtype, rows.scales[1]).squeeze(2)
                keys.masked_fill_(~(held & (keys_at <= last_slots(part)))[..., None], 0.0)
                seen = bucket_sees(None, part, 0, part.rows.shape[1], keys_at) & held[:, None]
                found.append(_best(top, q[part.rows], weights[part.rows], keys, seen))
        ids, counts = _joined(found)
        return Selection(ids[rows.layout.order], counts[rows.layout.order])

    return select


def _best(top: int, q: Tensor, weights: Tensor, keys: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
    """Return the choice of q [n, m, H, D] among keys [n, S, D]: ids [n * m, k], ascending, then S; and counts [n * m].

    seen: [n, m, S]. The keys of a sequence are in the order of its slots, from slot 0 on.
    """
    n, m = q.shape[:2]
    size = keys.shape[1]
    dots = (q.flatten(1, 2) @ keys.mT).unflatten(1, q.shape[1:3])  # [n, m, H, S]
    scores = torch.einsum("nmh,nmhs->nms", weights, dots.relu()).detach()
    # A stable sort puts the earlier of equal scores first, and NaN before all.
    order = scores.masked_fill(~seen, -torch.inf).sort(dim=-1, descending=True, stable=True).indices[..., :top]
    ids = torch.where(seen.expand(n, m, size).gather(-1, order), order, size).sort(-1).values.flatten(0, 1)
    return ids, (ids < size).sum(-1)


def _joined(found: list[tuple[Tensor, Tensor]]) -> Selection:
    most = max(ids.shape[1] for ids, _ in found)
    padded = [torch.nn.functional.pad(ids, (0, most - ids.shape[1])) for ids, _ in found]
    return Selection(torch.cat(padded), torch.cat([counts for _, counts in found]))


def indexed_attention(case: IndexedAttention):
    m = case.latent

    def attend(q: Tensor, rows: DenseRows | PagedRows, kv_b: Tensor, chosen: Selection) -> Tensor:
        outputs = []
        if isinstance(rows, DenseRows):
            latents, start = as_floats(rows.parts[0], q.dtype, rows.scales[0]), 0
            for n in rows.lengths:
                some = slice(start, start + n)
                mask = _mask(chosen.ids[None, some], chosen.counts[None, some], n)
                outputs.append(attend_in_form(m, q[None, some], Context(latents[None, some, 0], _of(mask)), kv_b)[0])
                start += n
            return torch.cat(outputs)
        pages = rows.parts[0]
        for bucket in rows.layout.buckets:
            for part in parts_of(bucket, pages, max(m.num_heads, m.row)):
                context = gather(pages, part, q.dtype, rows.scales[0])
                mask = _mask(chosen.ids[part.rows], chosen.counts[part.rows], context.rows.shape[1])
                out = attend_in_form(m, q[part.rows], Context(context.rows, _of(mask)), kv_b)
                outputs.append(out.flatten(0, 1))
        return torch.cat(outputs)[rows.layout.order]

    return attend


def _mask(ids: Tensor, counts: Tensor, size: int) -> Tensor:
    """Return which of `size` keys are chosen, [n, m, size]. ids: [n, m, k], of which `counts` [n, m] are valid."""
    valid = torch.arange(ids.shape[-1], device=ids.device) < counts[..., None]
    places = torch.where(valid, ids, size)
    return torch.zeros(*ids.shape[:2], size + 1, dtype=torch.bool, device=ids.device).scatter(-1, places, True)[
        ..., :size
    ]


def _of(mask: Tensor) -> Callable[[int, int], Tensor]:
    return lambda at, count: mask[:, at : at + count]
