"""Attention over pages and over whole sequences, and writes into pages, by kernels.

In a page, keys are laid out as [K, D, page_tokens], so that neighboring keys are neighbors in memory, values as
[K, page_tokens, D], and latents as values of one head. The int8 scales of a head, [page_tokens], follow its numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from ridgeline._kernels import Attention as Case
from ridgeline._kernels import Pool
from ridgeline._kernels import move_rows as move
from ridgeline._kernels import write_pages as write
from ridgeline.ops import api
from ridgeline.ops.api import DenseKeyValues, PagedKeyValues, PagedLayout
from ridgeline.ops.cpu.kernel import Kernel, Kernels, empty, never
from ridgeline.ops.cpu.matrices import Floats, Ndarray
from ridgeline.spec import Attention, Chunked, Dilated, FirstTokens, LatentAttention, Strided
from ridgeline.spec.storage import UNSCALED, KVScales

Ints = np.ndarray[Any, np.dtype[np.int64]]


def write_pages(case: Attention | LatentAttention, pool: Pool) -> Callable[..., None]:
    is_attention = isinstance(case, Attention)

    def run(
        pages: Sequence[Floats], parts: Sequence[Floats], write_page: Ints, write_slot: Ints,
        scales: KVScales = UNSCALED,
    ) -> None:  # fmt: skip
        for i, (view, x) in enumerate(zip(pages, parts, strict=True)):
            write(pool, for_kernels(view), x, write_page, write_slot, is_attention and i == 0, scales[i])

    return run


def move_rows(case: Attention | LatentAttention, pool: Pool) -> Callable[..., None]:
    is_attention = isinstance(case, Attention)

    def run(pages: Sequence[Floats], from_page: Ints, from_slot: Ints, to_page: Ints, to_slot: Ints) -> None:
        for i, view in enumerate(pages):
            move(pool, for_kernels(view), from_page, from_slot, to_page, to_slot, is_attention and i == 0)

    return run


def paged_attention(case: Attention, pool: Pool) -> Callable[..., Floats]:
    bound, width = bind(case), case.num_heads * case.head_dim

    def run(q: Floats, kv: PagedKeyValues, sinks: Floats | None = None) -> Floats:
        out = empty(pool, q.shape[0], width)
        keys, values = for_kernels(kv.keys), for_kernels(kv.values)
        bound.paged(pool, q, keys, values, *page_tables(kv.layout), sinks, out, *kv.scales, paths_of(kv.layout))
        return out

    return run


def attention(case: Attention, pool: Pool) -> Callable[..., Floats]:
    bound, width = bind(case), case.num_heads * case.head_dim

    def run(q: Floats, kv: DenseKeyValues, sinks: Floats | None = None) -> Floats:
        out = np.empty((q.shape[0], width), np.float32)
        lengths = np.array(kv.lengths, np.int64)
        bound.dense(pool, q, for_kernels(kv.keys), for_kernels(kv.values), lengths, sinks, out, *kv.scales)
        return out

    return run


def for_kernels(stored: Any) -> Ndarray:
    """Return stored rows in the form that kernels take: bfloat16 as integers."""
    rows: Ndarray = np.asarray(stored)
    return rows.view(np.uint16) if rows.dtype.itemsize == 2 and rows.dtype != np.float16 else rows


def page_tables(layout: PagedLayout) -> tuple[Ints, Ints, Ints]:
    """Return the first position, the length and the page table of each sequence of a step."""
    return np.asarray(layout.starts), np.asarray(layout.lengths), np.asarray(layout.tables)


def paths_of(layout: PagedLayout) -> Ints | None:
    """Return the paths of a step's tokens; None if no drafts form a tree."""
    return None if layout.paths is None else np.asarray(layout.paths)


def bind(case: Attention) -> Case:
    """Build the kernels' description of a case."""
    dim, softcap = case.head_dim, case.softcap or 0.0
    sizes = case.num_heads, case.num_kv_heads, dim, dim
    make = partial(Case, *sizes, case.scale, softcap, case.window or 0, block=case.sight.block)
    match case.pattern:
        case None:
            return make("", 0)
        case FirstTokens(count):
            return make("first_tokens", count)
        case Dilated(step):
            return make("dilated", step)
        case Strided(stride):
            return make("strided", stride)
        case Chunked():
            raise ValueError("no kernel has chunks of keys")


def _refuses(case: Attention) -> str | None:
    if isinstance(case.pattern, Chunked):
        return "these kernels have no chunks of keys"
    return "these kernels have no slopes (alibi)" if case.alibi is not None else None


KERNELS: Kernels = {
    api.WRITE_PAGES: Kernel(never, write_pages),
    api.MOVE_ROWS: Kernel(never, move_rows),
    api.PAGED_ATTENTION: Kernel(_refuses, paged_attention),
    api.ATTENTION: Kernel(_refuses, attention),
}
