"""Attention over pages, and the write into them. No loop over sequences: one over buckets of like shapes."""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline.ops.api import Bucket, PagedKeyValues
from ridgeline.spec import Attention


def write_pages(pages: Tensor, x: Tensor, write_page: Tensor, write_slot: Tensor) -> None:
    pages[write_page, write_slot] = x.to(pages.dtype)


def paged_attention(case: Attention):
    def attend(q: Tensor, kv: PagedKeyValues) -> Tensor:
        results = [_attend_bucket(case, q, kv, bucket) for bucket in kv.layout.buckets]
        return torch.cat(results)[kv.layout.order]

    return attend


def _attend_bucket(case: Attention, q: Tensor, kv: PagedKeyValues, b: Bucket) -> Tensor:
    """All queries of a bucket: [n * m, H * D]."""
    n, m = b.rows.shape
    groups = case.num_heads // case.num_kv_heads
    # Queries of one key head stand together: [n, K, m * G, D].
    queries = q[b.rows].unflatten(2, (case.num_kv_heads, groups)).permute(0, 2, 1, 3, 4).flatten(2, 3)
    keys, values = (x[b.pages].flatten(1, 2).transpose(1, 2).float() for x in (kv.keys, kv.values))  # [n, K, S, D]
    seen = _visible(case, b, kv.keys.shape[1])  # [n, m, S]
    # What no query sees may be anything, NaN included: a weight of zero would not silence it.
    values = values.masked_fill(~seen.any(1)[:, None, :, None], 0.0)
    scores = queries @ keys.transpose(2, 3) * case.scale
    if case.softcap:
        scores = case.softcap * torch.tanh(scores / case.softcap)
    hidden = ~seen[:, None, :, None].expand(n, 1, m, groups, -1).flatten(2, 3)
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    out = (weights @ values).unflatten(2, (m, groups)).permute(0, 2, 1, 3, 4)  # [n, m, K, G, D]
    return out.reshape(n * m, -1)


def _visible(case: Attention, b: Bucket, page_tokens: int) -> Tensor:
    """Which keys each query of a bucket sees: [n, m, S]."""
    key = b.first[:, None] + torch.arange(b.pages.shape[1] * page_tokens, device=b.pages.device)
    query = b.positions[:, :, None]
    held = (b.pages != 0).repeat_interleave(page_tokens, 1)
    seen = (key[:, None] <= query) & held[:, None]
    return seen if case.window is None else seen & (key[:, None] > query - case.window)
