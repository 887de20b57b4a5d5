"""The first and last ops of a step: from token ids, positions and page tables to inputs; from logits to ids."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ridgeline import _kernels
from ridgeline._kernels import Pool
from ridgeline.ops import api
from ridgeline.ops.api import Rotary
from ridgeline.ops.cpu.kernel import Kernel, Kernels, empty, integers, never
from ridgeline.ops.cpu.matrices import Floats, Ndarray, dense, kind_of
from ridgeline.ops.cpu.state import StatesInPages

Ints = np.ndarray[Any, np.dtype[np.int64]]


def embedding(case: None, pool: Pool) -> Callable[[Ndarray, Ints], Floats]:
    def run(table: Ndarray, ids: Ints) -> Floats:
        out = empty(pool, ids.size, table.shape[1])
        _kernels.embed(pool, dense(table), kind_of(table), ids, out)
        return out

    return run


def take(case: None, pool: Pool) -> Callable[[Floats | StatesInPages, Ints], Floats]:
    def run(x: Floats | StatesInPages, rows: Ints) -> Floats:
        return x[rows] if isinstance(x, StatesInPages) else rows_from(pool, (x,), rows)

    return run


def rows_from(pool: Pool, parts: Sequence[Floats], rows: Ints) -> Floats:
    """Return rows [*shape of `rows`, ...] of one array or of two, [n, ...] each, counted through both."""
    first, *more = (with_heads(x) for x in parts)
    out = empty(pool, rows.size, *parts[0].shape[1:])
    _kernels.take_rows(pool, first, more[0] if more else None, rows.reshape(-1), out)
    return out.reshape(*rows.shape, *parts[0].shape[1:])


def with_heads(x: Floats) -> Floats:
    """Return x [n, ...] as [n, heads, columns], whose columns are dense."""
    if x.ndim == 3 and x.strides[2] == x.itemsize:
        return x
    rows = x if x.strides[-1] == x.itemsize else np.ascontiguousarray(x)
    return rows.reshape(len(x), 1, math.prod(x.shape[1:]))


def rotary(case: None, pool: Pool) -> Callable[[Ints, Floats, float], Rotary]:
    def run(positions: Ints, frequencies: Floats, factor: float) -> Rotary:
        cos, sin = (empty(pool, positions.size, frequencies.shape[-1]) for _ in range(2))
        _kernels.rotary(pool, positions, frequencies, factor, cos, sin)
        return Rotary(cos, sin)

    return run


def decode_layout(case: None, pool: Pool) -> Callable[[Ints, Ints, Ints, Ints, int], tuple[Ints, Ints, Ints]]:
    def run(page_table: Ints, rows: Ints, positions: Ints, last: Ints, page_tokens: int) -> tuple[Ints, Ints, Ints]:
        pages, slots = integers(pool, rows.size), integers(pool, rows.size)
        tables = integers(pool, last.size, page_table.shape[1])
        _kernels.decode_layout(pool, page_table, rows, positions, last, page_tokens, pages, slots, tables)
        return pages, slots, tables

    return run


def best(case: None, pool: Pool) -> Callable[[Floats], tuple[Ints, Floats]]:
    def run(logits: Floats) -> tuple[Ints, Floats]:
        ids, values = integers(pool, len(logits)), empty(pool, len(logits))
        _kernels.best(pool, logits, ids, values)
        return ids, values

    return run


def draw(case: None, pool: Pool) -> Callable[[Floats, Ints, Ints | None], tuple[Ints, Floats]]:
    def run(logits: Floats, draws: Ints, token_ids: Ints | None) -> tuple[Ints, Floats]:
        ids, values = integers(pool, len(logits)), empty(pool, len(logits))
        _kernels.draw_rows(pool, logits, draws, token_ids, ids, values)
        return ids, values

    return run


KERNELS: Kernels = {
    api.EMBEDDING: Kernel(never, embedding),
    api.TAKE: Kernel(never, take),
    api.ROTARY: Kernel(never, rotary),
    api.DECODE_LAYOUT: Kernel(never, decode_layout),
    api.BEST: Kernel(never, best),
    api.DRAW: Kernel(never, draw),
}
