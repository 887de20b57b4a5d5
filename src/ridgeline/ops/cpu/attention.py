"""Attention over pages and over whole sequences, and the write into pages, by kernels.

Inside a page's view keys stand as [K, D, page_tokens], so that neighbouring keys are neighbours in memory, and values
as [K, page_tokens, D]; latents stand as their shape says.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ridgeline._kernels import Attention as Case
from ridgeline._kernels import Pool
from ridgeline._kernels import write_pages as write
from ridgeline.ops import api
from ridgeline.ops.api import DenseKeyValues, PagedKeyValues
from ridgeline.ops.cpu.kernel import Kernel, Kernels, never
from ridgeline.spec import Attention, Dilated, FirstTokens, LatentAttention, Strided

Floats = np.ndarray[Any, np.dtype[np.float32]]
Ints = np.ndarray[Any, np.dtype[np.int64]]


def write_pages(case: Attention | LatentAttention, pool: Pool) -> Callable[..., None]:
    is_attention = isinstance(case, Attention)

    def run(pages: Sequence[Floats], parts: Sequence[Floats], write_page: Ints, write_slot: Ints) -> None:
        for i, (view, x) in enumerate(zip(pages, parts, strict=True)):
            write(pool, view, x, write_page, write_slot, is_attention and i == 0)

    return run


def paged_attention(case: Attention, pool: Pool) -> Callable[..., Floats]:
    bound, width = bind(case), case.num_heads * case.head_dim

    def run(q: Floats, kv: PagedKeyValues, sinks: Floats | None = None) -> Floats:
        out, layout = np.empty((q.shape[0], width), np.float32), kv.layout
        bound.paged(pool, q, kv.keys, kv.values, layout.starts, layout.lengths, layout.tables, sinks, out)
        return out

    return run


def attention(case: Attention, pool: Pool) -> Callable[..., Floats]:
    bound, width = bind(case), case.num_heads * case.head_dim

    def run(q: Floats, kv: DenseKeyValues, sinks: Floats | None = None) -> Floats:
        out = np.empty((q.shape[0], width), np.float32)
        bound.dense(pool, q, kv.keys, kv.values, np.array(kv.lengths, np.int64), sinks, out)
        return out

    return run


def bind(case: Attention) -> Case:
    """What the kernels must know of a case."""
    match case.pattern:
        case None:
            pattern, number = "", 0
        case FirstTokens(number):
            pattern = "first_tokens"
        case Dilated(number):
            pattern = "dilated"
        case Strided(number):
            pattern = "strided"
    heads, dim = (case.num_heads, case.num_kv_heads), case.head_dim
    return Case(*heads, dim, dim, case.scale, case.softcap or 0.0, case.window or 0, pattern, number)


KERNELS: Kernels = {
    api.WRITE_PAGES: Kernel(never, write_pages),
    api.PAGED_ATTENTION: Kernel(never, paged_attention),
    api.ATTENTION: Kernel(never, attention),
}
