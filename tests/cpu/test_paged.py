"""Attention over pages against dense attention, with NaN in every slot that must not be read."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.ops import api, open_table
from ridgeline.ops.api import Array, DenseKeyValues, Memory, PagedKeyValues
from ridgeline.ops.host import attention as host
from ridgeline.ops.reference import paged
from ridgeline.runtime.layout import Slices, build_layout
from ridgeline.spec import ALL, Attention, Blocks, Chunked, Dilated, FirstTokens, Pattern, Sight, Strided
from ridgeline.spec.sight import CAUSAL

REFERENCE = open_table("reference", {"attention": "reference"})
TABLES = {"reference": REFERENCE, "cpu": open_table("cpu")}
DEVICES = pytest.mark.parametrize("device", TABLES)
NAN = float("nan")


class Pages:
    """An arena of one layer, its page tables, and an allocator that fills freed pages with NaN.

    Six sequences of 100 tokens fit, in pages of one token.
    """

    def __init__(self, case: Attention, page_tokens: int, rows: int, rng: np.random.Generator, memory: Memory) -> None:
        self.case, self.size = case, page_tokens
        shape = (page_tokens, case.num_kv_heads, case.head_dim)
        size = 4 * math.prod(shape)
        self.arena: Any = memory.page_view(memory.pages(601, 2 * size), 0, (size // 2,), "float32")
        self.arena[:] = NAN
        self.keys, self.values = (self.arena[:, i * size // 4 :][:, : size // 4].reshape(601, *shape) for i in range(2))
        self.tables = np.zeros((rows, 130), np.int64)
        self.free = rng.permutation(np.arange(1, 601)).tolist()
        self.state = case.state()

    def grow(self, row: int, start: int, end: int) -> None:
        for index in range(start // self.size, (end - 1) // self.size + 1):
            if not self.tables[row, index]:
                self.tables[row, index] = self.free.pop()

    def drop_unread(self, row: int, position: int) -> None:
        first = -(-self.state.first_tokens // self.size)
        for index in range(first, max(0, position - self.state.lookback) // self.size):
            page, self.tables[row, index] = self.tables[row, index], 0
            self.arena[page] = NAN
            if page:
                self.free.append(page)


def run_chunks(
    case: Attention, page_tokens: int, lengths: list[int], seed: int, device: str
) -> tuple[np.ndarray, np.ndarray]:
    """Return a device's paged results over random chunks of all sequences, and dense results of the definition.

    Chunks end at the end of a block, or of the sequence: tokens of a block see each other.
    """
    block = case.sight.block
    rng, table = np.random.default_rng(seed), TABLES[device]
    heads = (case.num_heads, case.num_kv_heads, case.num_kv_heads)
    q, k, v = (rng.normal(size=(sum(lengths), h, case.head_dim)).astype(np.float32) for h in heads)
    sinks = rng.normal(size=case.num_heads).astype(np.float32) if case.sinks else None
    there = [torch.from_numpy(x) for x in (q, k, v)]
    kv = DenseKeyValues(there[1], there[2], tuple(lengths))
    wanted = REFERENCE.primitive(api.ATTENTION, case)(there[0], kv, None if sinks is None else torch.from_numpy(sinks))
    dense = REFERENCE.memory.get(wanted)

    def put(x: np.ndarray) -> Array:
        return table.memory.put(x, "float32", "float32")

    attend, write = table.primitive(api.PAGED_ATTENTION, case), table.primitive(api.WRITE_PAGES, case)
    pages = Pages(case, page_tokens, len(lengths), rng, table.memory)
    offsets, done, out = np.cumsum(lengths) - lengths, [0] * len(lengths), np.full_like(dense, NAN)
    rows = rng.permutation(len(lengths))
    while any(d < n for d, n in zip(done, lengths, strict=True)):
        chosen = [i for i, n in enumerate(lengths) if done[i] < n and rng.random() < 0.7]
        if not chosen:
            continue
        counts = [int(min(lengths[i] - done[i], -(-rng.integers(1, 20) // block) * block)) for i in chosen]
        for i, count in zip(chosen, counts, strict=True):
            pages.grow(rows[i], done[i], done[i] + count)
        slices = Slices.plain(rows[chosen], np.array([done[i] for i in chosen]), np.array(counts))
        state = pages.state
        layout = build_layout(slices, pages.tables, page_tokens, state.lookback, table.memory, state.first_tokens)
        spans = [offsets[i] + done[i] + np.arange(c) for i, c in zip(chosen, counts, strict=True)]
        tokens = np.concatenate(spans)
        added = put(k[tokens]), put(v[tokens])
        write((pages.keys, pages.values), added, layout.write_pages, layout.write_slots)
        paged_kv = PagedKeyValues(pages.keys, pages.values, layout)
        out[tokens] = table.memory.get(attend(put(q[tokens]), paged_kv, None if sinks is None else put(sinks)))
        for i, count in zip(chosen, counts, strict=True):
            done[i] += count
            pages.drop_unread(rows[i], done[i])
    return out, dense


@settings(max_examples=160, deadline=None)
@given(
    heads=st.sampled_from([(1, 1), (4, 4), (6, 2), (8, 1)]),
    window=st.sampled_from([None, 1, 2, 7, 24, 200]),
    softcap=st.sampled_from([None, 2.0]),
    sinks=st.booleans(),
    pattern=st.none()
    | st.builds(FirstTokens, st.integers(1, 40))
    | st.builds(Dilated, st.integers(1, 9))
    | st.builds(Strided, st.integers(1, 30))
    | st.builds(Chunked),
    alibi=st.sampled_from([None, 8.0]),
    sight=st.sampled_from([CAUSAL, CAUSAL, Blocks(1), Blocks(4), Blocks(7), Blocks(32)]),
    page_tokens=st.sampled_from([1, 3, 16, 64]),
    lengths=st.lists(st.integers(1, 100), min_size=1, max_size=6),
    seed=st.integers(0, 2**16),
    device=st.sampled_from(list(TABLES)),
)
def test_paged_equals_dense(
    heads: tuple[int, int], window: int | None, softcap: float | None, sinks: bool, pattern: Pattern | None,
    alibi: float | None, sight: Sight, page_tokens: int, lengths: list[int], seed: int, device: str,
) -> None:  # fmt: skip
    window, alibi = (window, alibi) if sight == CAUSAL else (None, None)
    pattern = pattern if window else None
    look = {"window": window, "pattern": pattern, "sight": sight, "alibi": alibi}
    case = Attention(*heads, 8, 0.3, softcap=softcap, sinks=sinks, **look)
    out, dense = run_chunks(case, page_tokens, lengths, seed, device)
    np.testing.assert_allclose(out, dense, rtol=1e-5, atol=3e-6)


@DEVICES
@pytest.mark.parametrize("look", [{}, {"window": 7}, {"sight": Blocks(8)}], ids=str)
def test_blocks_of_queries_change_nothing(look: dict[str, Any], device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """To bound memory, a long chunk against a long context is computed for a few queries and sequences at a time."""
    monkeypatch.setattr(paged, "CPU_BLOCK", 500)
    monkeypatch.setattr(host, "BLOCK", 500)
    out, dense = run_chunks(Attention(6, 2, 8, 0.3, **look), 4, [90, 40, 3], 1, device)
    np.testing.assert_allclose(out, dense, rtol=1e-5, atol=3e-6)


def test_sequences_of_very_different_lengths_share_no_padding() -> None:
    """With a long context beside many short ones, buckets keep the padded work within a few times the real work."""
    slices = Slices.plain(np.arange(33), np.array([4000] + [10] * 32), np.ones(33, np.int64))
    layout = build_layout(slices, np.ones((33, 300), np.int64), 16, ALL, REFERENCE.memory)
    padded = sum(b.pages.shape[0] * b.pages.shape[1] for b in layout.buckets)
    assert padded <= 2 * (4000 // 16 + 1 + 32)


@pytest.mark.parametrize("page_tokens", [1, 16])
def test_writing_touches_the_written_slots_only(page_tokens: int) -> None:
    write = REFERENCE.primitive(api.WRITE_PAGES, Attention(2, 2, 4, 1.0))
    pages = torch.full((5, page_tokens, 2, 4), NAN)
    x = torch.randn(3, 2, 4)
    slots = torch.tensor([0, page_tokens - 1, 0])
    write((pages,), (x,), torch.tensor([4, 2, 1]), slots)
    for i, (page, slot) in enumerate(zip([4, 2, 1], slots.tolist(), strict=True)):
        assert torch.equal(pages[page, slot], x[i])
    assert int(torch.isfinite(pages).sum()) == x.numel()
