"""Select keys by an indexer, and attend over them, by kernels.

Each query is a sequence of its own, whose keys are those that it has chosen, in the order of their positions. The
kernel for latents reads them where they are: to it, each row of the arena is a page of one token. So a choice of all
keys has the bits of attention without an indexer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from ridgeline._kernels import Pool
from ridgeline._kernels import select_keys as select
from ridgeline.ops import api
from ridgeline.ops.api import DenseRows, PagedRows, Selection
from ridgeline.ops.cpu.attention import Ints, for_kernels, page_tables, paths_of
from ridgeline.ops.cpu.kernel import Kernel, Kernels, never
from ridgeline.ops.cpu.latent import absorbed_form, bind
from ridgeline.ops.cpu.matrices import Floats, Ndarray
from ridgeline.ops.host.stored import as_floats, latents_of, read_rows
from ridgeline.spec import IndexedAttention

SCORES = 1 << 22  # most scores that are held at once; one query may have more


class Sequence(NamedTuple):
    """The queries of a sequence: rows [first, last) of the step, from slot `start` on, and the indexer's keys [S, D].

    paths: as in PagedLayout, of these queries; None: they form no tree.
    """

    first: int
    last: int
    start: int
    keys: Floats
    paths: Ints | None = None

    def seen(self) -> Ints | None:
        """Return which keys each query of a tree sees, [n, S] of 0 and 1; None for a chain."""
        if self.paths is None or not self.paths.any():
            return None
        slots, known = np.arange(len(self.keys)), int((self.paths == 0).sum())
        drafts = slots - (self.start + known)
        on_path = (self.paths[:, None] >> np.clip(drafts, 0, 62)) & 1
        own = self.start + np.arange(len(self.paths))[:, None]
        tree = np.where(drafts < 0, 1, on_path)
        return np.where(self.paths[:, None] == 0, slots <= own, tree).astype(np.int64)


def select_keys(case: IndexedAttention, pool: Pool) -> Callable[[Floats, Floats, DenseRows | PagedRows], Selection]:
    top = case.indexer.top_k

    def run(q: Floats, weights: Floats, rows: DenseRows | PagedRows) -> Selection:
        sequences = list(_sequences(rows))
        most = min(top, max((len(s.keys) for s in sequences), default=1))
        ids, counts = np.zeros((len(q), most), np.int64), np.zeros(len(q), np.int64)
        for s in sequences:
            seen, size = s.seen(), max(1, SCORES // max(1, len(s.keys)))
            for begin in range(s.first, s.last, size):
                some = slice(begin, min(begin + size, s.last))
                limits = s.start + 1 + np.arange(some.start - s.first, some.stop - s.first)
                own = None if seen is None else seen[some.start - s.first : some.stop - s.first]
                select(pool, q[some], weights[some], s.keys, limits, own, ids[some], counts[some])
        return Selection(ids, counts)

    return run


def _sequences(rows: DenseRows | PagedRows) -> Iterator[Sequence]:
    first = 0
    if isinstance(rows, DenseRows):
        keys = as_floats(np.asarray(rows.parts[1]), rows.scales[1])
        for n in rows.lengths:
            yield Sequence(first, first + n, 0, np.ascontiguousarray(keys[first : first + n, 0]))
            first += n
        return
    starts, lengths, tables = page_tables(rows.layout)
    paths, pages = paths_of(rows.layout), np.asarray(rows.parts[1])
    view, page_tokens = latents_of(pages), pages.shape[1]
    for start, n, table in zip(starts.tolist(), lengths.tolist(), tables, strict=True):
        end = start + n
        held = read_rows(view, table[None, : -(-end // page_tokens)], True, rows.scales[1])[0, :end, 0]
        own = None if paths is None else paths[first : first + n]
        yield Sequence(first, first + n, start, np.ascontiguousarray(held), own)
        first += n


def indexed_attention(
    case: IndexedAttention, pool: Pool
) -> Callable[[Floats, DenseRows | PagedRows, Ndarray, Selection], Floats]:
    bound, absorbed = bind(case.latent), absorbed_form(case.latent, pool)

    def run(q: Floats, rows: DenseRows | PagedRows, kv_b: Ndarray, chosen: Selection) -> Floats:
        ids, counts = np.asarray(chosen.ids), np.asarray(chosen.counts)
        pages, table = _dense(rows, ids) if isinstance(rows, DenseRows) else _paged(rows, ids)
        starts, lengths = counts - 1, np.ones_like(counts)

        def attend(queries: Floats, out: Floats) -> None:
            bound.paged_latents(pool, queries, pages, starts, lengths, table, out, rows.scales[0], None)

        return absorbed(q, kv_b, attend)

    return run


def _dense(rows: DenseRows, ids: Ints) -> tuple[Ndarray, Ints]:
    """Return the rows as pages of one token, and the page of each chosen key."""
    first = np.repeat(np.cumsum([0, *rows.lengths[:-1]]), rows.lengths)
    return for_kernels(rows.parts[0])[:, None], first[:, None] + ids


def _paged(rows: PagedRows, ids: Ints) -> tuple[Ndarray, Ints]:
    """Return views of single rows of the arena, and the view of each chosen key."""
    _, lengths, tables = page_tables(rows.layout)
    stored = for_kernels(rows.parts[0])
    count, page_tokens, _, row = stored.shape
    page = tables[np.repeat(np.arange(len(lengths)), lengths)[:, None], ids // page_tokens]
    if stored.dtype == np.int8:  # a row and its scale are apart: the chosen ones are copied side by side
        numbers, scales = latents_of(np.asarray(rows.parts[0]))
        assert scales is not None
        slot = ids % page_tokens
        own = np.ascontiguousarray(scales[page, 0, slot][..., None]).view(np.int8)
        copied = np.concatenate((numbers[page, 0, slot], own), -1).reshape(-1, 1, 1, row)
        return copied, np.arange(ids.size).reshape(ids.shape)
    step, slot_bytes = stored.strides[0], stored.strides[1]
    unit = math.gcd(step, slot_bytes)
    views = ((count - 1) * step + (page_tokens - 1) * slot_bytes) // unit + 1
    shape, strides = (views, 1, 1, row), (unit, slot_bytes, slot_bytes, stored.itemsize)
    return np.lib.stride_tricks.as_strided(stored, shape, strides), (
        page * step + ids % page_tokens * slot_bytes
    ) // unit


KERNELS: Kernels = {
    api.SELECT_KEYS: Kernel(never, select_keys),
    api.INDEXED_ATTENTION: Kernel(never, indexed_attention),
}
