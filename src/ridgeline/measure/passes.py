"""Measure rates of passes over numbers through the ops table: products with matrices, attention over keys and values.

Near passes read the same few numbers again and again; far passes read more numbers than any cache holds. Each figure is
the best of a few tries, because other programs only make a try longer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from ridgeline.ops import OpsTable, api
from ridgeline.ops.api import PagedKeyValues
from ridgeline.quant import store
from ridgeline.runtime.layout import Slices, build_layout
from ridgeline.spec import Attention
from ridgeline.spec.groups import state_groups
from ridgeline.spec.model import ModelSpec
from ridgeline.spec.norm import RMSNorm
from ridgeline.spec.quant import format_of
from ridgeline.spec.rates import Curve, Passes
from ridgeline.spec.storage import STORAGES, UNSCALED

# By the name of a stored type: --weights, and the type that a matrix comes in.
TYPES = {"float32": ("auto", "float32"), "bfloat16": ("auto", "bfloat16"), "int8": ("int8", "float32"),
         "int4": ("int4", "float32")}  # fmt: skip
ROWS = (1, 2, 4, 8, 16, 32, 64, 256)
ATTENTION_ROWS = (1, 2, 4, 8, 16, 64, 512, 2048)
OUT, WIDTH = 1536, 768  # size of the timed matrices
FAR_BYTES, NEAR_BYTES = 192 << 20, 4 << 20
FAR_SIZES = (4 << 20, 16 << 20, 32 << 20, 64 << 20, 128 << 20, FAR_BYTES)
TRIES, TRY_S = 4, 0.1
CONTEXT, PAGE = 512, 16
BYTES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "int8": 1.0, "fp8": 1.0, "int4": 0.5625}


def best_s(run: Callable[[], Any]) -> float:
    """Return the seconds of the best of some tries, after one that warms up."""
    run()
    begin, best = time.perf_counter(), float("inf")
    for _ in range(TRIES):
        start = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - start)
        if time.perf_counter() - begin > TRY_S:
            break
    return best


def product_passes(table: OpsTable, kind: str) -> Passes:
    """Return the seconds of one number and one row by the number of rows, for matrices stored as `kind`."""
    near = _products(table, kind, NEAR_BYTES)
    far = _products(table, kind, FAR_BYTES)
    few = [_seconds_each(near, rows) for rows in ROWS]
    many = [max(_seconds_each(far, rows), f) if rows <= 64 else f for rows, f in zip(ROWS, few, strict=True)]
    return Passes(_rising(ROWS, few), _rising(ROWS, many))


def far_shares(table: OpsTable) -> Curve:
    """Return the share of repeatedly read bytes that comes from memory each time, by the number of bytes."""
    products = _products(table, "float32", FAR_BYTES)
    size = int(BYTES["float32"]) * OUT * WIDTH
    seconds = [_seconds_each(products[: max(1, n // size)], 1) for n in FAR_SIZES]
    least, most = min(seconds), max(seconds)
    shares = [min(max((s - least) / max(most - least, 1e-30), 1e-6), 1.0) for s in seconds]
    rising = [max(shares[: i + 1]) for i in range(len(shares))]
    return Curve(tuple(map(float, FAR_SIZES)), tuple(rising))


def _products(table: OpsTable, kind: str, size: int) -> list[Any]:
    weights, dtype = TYPES[kind]
    few: Any = np.random.default_rng(0).standard_normal((64, WIDTH), dtype=np.float32) / 30
    weight = np.ascontiguousarray(few[np.arange(OUT) % len(few)])
    found = []
    for _ in range(max(1, int(size / (BYTES[kind] * OUT * WIDTH)))):
        one = store(table.memory.put(weight, "float32", dtype), None, table, format_of(weights))
        one.prepare()
        found.append(one)
    return found


def _seconds_each(matrices: Sequence[Any], rows: int) -> float:
    x = np.random.default_rng(1).standard_normal((rows, WIDTH), dtype=np.float32)
    # One call more or less is hidden in a try of many; of many rows few matrices are enough.
    some = matrices[: max(1, min(len(matrices), int(8e9 / (2 * rows * OUT * WIDTH))))]

    def run() -> None:
        for matrix in some:
            matrix.apply(x)

    return best_s(run) / (len(some) * OUT * WIDTH * rows)


def attention_passes(table: OpsTable, kind: str) -> Passes:
    """Return the seconds that a number of keys or values takes for one row of queries, by the rows that share the key.

    Up to eight rows are the grouped heads of a decode; more rows are a prompt.
    """
    near, far = [], []
    for rows in ATTENTION_ROWS:
        group, tokens = (rows, 1) if rows <= 8 else (4, rows // 4)
        near.append(attention_s(table, kind, group, tokens, 2))
        far.append(max(attention_s(table, kind, group, tokens, 48), near[-1]) if tokens == 1 else near[-1])
    return Passes(_rising(ATTENTION_ROWS, near), _rising(ATTENTION_ROWS, far))


def _rising(rows: Sequence[int], seconds: Sequence[float]) -> Curve:
    """Return the seconds of a row, raised so that more rows never take less in all. Shorter times were disturbed."""
    values: list[float] = []
    for i, one in enumerate(seconds):
        values.append(max(one, values[-1] * rows[i - 1] / rows[i]) if i else one)
    return Curve(tuple(map(float, rows)), tuple(values))


def attention_s(
    table: OpsTable, kind: str, group: int, tokens: int, layers: int, sequences: int | None = None
) -> float:
    """Return the seconds that a number of keys or values takes for one row of queries.

    kind: type of keys and values. group: query heads that share a key. tokens: tokens of each sequence's step. layers:
    layers whose pages are read in turn. sequences: number of sequences in the step; None: 4, or 1 for prompts.
    """
    kv_heads, dim = 4, 64
    sequences = sequences or (4 if tokens == 1 else 1)
    case = Attention(kv_heads * group, kv_heads, dim, dim**-0.5)
    context = max(CONTEXT, 2 * tokens)
    views, tables = _pages(table, case, kind, sequences, context, layers)
    starts = np.full(sequences, context - tokens)
    slices = Slices.plain(np.arange(sequences), starts, np.full(sequences, tokens))
    layout = build_layout(slices, tables, PAGE, context, table.memory)
    rng = np.random.default_rng(0)
    q = rng.standard_normal((sequences * tokens, case.num_heads, dim), dtype=np.float32)
    attend = table.primitive(api.PAGED_ATTENTION, case)

    def run() -> None:
        for keys, values in views:
            attend(q, PagedKeyValues(keys, values, layout), None)

    pairs = tokens * context - tokens * (tokens - 1) // 2
    work = sequences * pairs * case.num_heads * 2 * dim
    return best_s(run) / (layers * work)


def _pages(
    table: OpsTable, case: Attention, kind: str, sequences: int, context: int, layers: int
) -> tuple[list[Any], Any]:
    """Return views of the keys and values of `layers` layers, and the page tables."""
    from ridgeline.spec import Layer

    spec = ModelSpec("x", 1, 1, 1, (Layer(case, None, RMSNorm()),) * layers, RMSNorm())
    (group,) = state_groups(spec, page_tokens=PAGE, storage=STORAGES[kind])
    count = sequences * (context // PAGE) + 1
    memory, write = table.memory, table.primitive(api.WRITE_PAGES, case)
    arena = memory.pages(count, group.page_bytes)
    views = list(_views(memory, arena, group))
    rng, places = np.random.default_rng(0), np.arange(PAGE)
    rows = [rng.standard_normal((PAGE, case.num_kv_heads, case.head_dim), dtype=np.float32) for _ in range(2)]
    for view in views:
        write(view, rows, memory.integers(np.zeros(PAGE, np.int64)), memory.integers(places), UNSCALED)
    memory.copy_pages(arena, [0] * (count - 1), list(range(1, count)))
    return views, rng.permutation(np.arange(1, count)).reshape(sequences, -1)


def _views(memory: Any, arena: Any, group: Any) -> Iterator[Any]:
    for slot in group.slots:
        yield tuple(memory.page_view(arena, p.offset, (PAGE, *p.shape), p.dtype) for p in slot.parts)
