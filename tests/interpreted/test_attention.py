"""Attention over pages against its definition in float64, with NaN in every slot that must not be read."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from interpreted.guarded import interpreted, reference, serves
from ridgeline.ops import api
from ridgeline.ops.api import PagedKeyValues
from ridgeline.ops.triton import paged
from ridgeline.runtime.layout import Slices, build_layout
from ridgeline.spec import Attention, Strided

TABLE, REFERENCE = interpreted(), reference()
NAN = float("nan")


class Sequences:
    """Keys and values of sequences in pages of random numbers; pages and slots behind the last token are NaN."""

    def __init__(self, case: Attention, ends: list[int], page: int, dtype: torch.dtype, seed: int = 0) -> None:
        self.case, self.page = case, page
        rng, generator = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
        count = -(-max(ends) // page)
        free = rng.permutation(np.arange(1, len(ends) * count + 1)).tolist()
        self.tables = np.zeros((len(ends), count), np.int64)
        both = torch.full((len(ends) * count + 1, 2, page, case.num_kv_heads, case.head_dim), NAN, dtype=dtype)
        for row, end in enumerate(ends):
            for slot in range(end):
                self.tables[row, slot // page] = self.tables[row, slot // page] or free.pop()
                drawn = torch.randn(2, case.num_kv_heads, case.head_dim, generator=generator)
                both[self.tables[row, slot // page], :, slot % page] = drawn.to(dtype)
        self.keys, self.values = both[:, 0], both[:, 1]
        self.q = [torch.randn(end, case.num_heads, case.head_dim, generator=generator) * 4 for end in ends]
        self.sinks = torch.randn(case.num_heads, generator=generator) if case.sinks else None

    def step(self, rows: list[int], starts: list[int], counts: list[int]) -> tuple[torch.Tensor, PagedKeyValues]:
        """Return the queries of a step, and what it reads. Pages before the window are freed, and NaN."""
        state, keys, values, tables = self.case.state(), self.keys.clone(), self.values.clone(), self.tables.copy()
        for row, start, count in zip(rows, starts, counts, strict=True):
            for index in range(max(0, start - state.lookback) // self.page):
                for view in (keys, values):
                    view[tables[row, index]] = NAN
                tables[row, index] = 0
            for slot in range(start + count, -(-(start + count) // self.page) * self.page):
                for view in (keys, values):
                    view[tables[row, slot // self.page], slot % self.page] = NAN
        slices = Slices.plain(np.array(rows), np.array(starts), np.array(counts))
        layout = build_layout(slices, tables, self.page, state.lookback, REFERENCE.memory)
        q = torch.cat([self.q[row][s : s + n] for row, s, n in zip(rows, starts, counts, strict=True)])
        return q, PagedKeyValues(keys, values, layout)

    def error(self, rows: list[int], starts: list[int], counts: list[int]) -> float:
        q, kv = self.step(rows, starts, counts)
        got = TABLE.primitive(api.PAGED_ATTENTION, self.case)(q, kv, self.sinks)
        wanted = REFERENCE.primitive(api.PAGED_ATTENTION, self.case)(q.double(), kv, self.sinks)
        return float((got - wanted).abs().max())


PLAIN = Attention(4, 2, 64, 0.125)
ODD = Attention(6, 2, 20, 0.2, window=24, softcap=20.0, sinks=True)


@pytest.fixture(autouse=True)
def short_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Divide the keys of short sequences, too: into splits of two tiles."""
    monkeypatch.setattr(paged, "SPLIT", 64)
    monkeypatch.setattr(paged, "BLOCK_KEYS", 32)


@pytest.mark.parametrize(
    ("case", "dtype", "page"),
    [
        (PLAIN, torch.float16, 16), (PLAIN, torch.bfloat16, 1), (ODD, torch.float16, 3),
        (replace(ODD, window=None, softcap=2.0), torch.bfloat16, 16), (Attention(8, 1, 128, 0.1), torch.float16, 16),
        (replace(PLAIN, num_heads=2, window=1), torch.float16, 16), (replace(ODD, window=200), torch.bfloat16, 63),
    ],
)  # fmt: skip
def test_chunks_and_decode_steps_equal_the_definition(case: Attention, dtype: torch.dtype, page: int) -> None:
    assert serves(TABLE, api.PAGED_ATTENTION, case)
    sequences = Sequences(case, [257, 63, 100, 1], page, dtype)
    bound = 1e-4 if dtype == torch.bfloat16 else 1e-5  # weights are two slices: 2^-17 and 2^-22 of each
    assert sequences.error([0, 2, 3], [256, 99, 0], [1, 1, 1]) < bound
    assert sequences.error([1, 0, 2], [0, 250, 40], [63, 7, 1]) < bound


@pytest.mark.parametrize("case", [PLAIN, replace(ODD, window=70)])
def test_a_token_has_the_same_bits_in_every_step(case: Attention) -> None:
    """The token at position 199 is decoded alone, beside others, in a chunk, and by one program for all splits."""
    attend, sequences = TABLE.primitive(api.PAGED_ATTENTION, case), Sequences(case, [200, 257, 63], 16, torch.float16)

    def last(rows: list[int], starts: list[int], counts: list[int]) -> torch.Tensor:
        """Return the result of the last token of row 0, which comes first in the step."""
        q, kv = sequences.step(rows, starts, counts)
        return attend(q, kv, sequences.sinks)[counts[0] - 1]

    alone = last([0], [199], [1])
    assert torch.equal(alone, last([0, 1, 2], [199, 256, 62], [1, 1, 1]))
    assert torch.equal(alone, last([0], [170], [30]))
    assert torch.equal(alone, last([0, 2, 1], [193, 0, 250], [7, 63, 1]))


def test_few_and_many_programs_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    sequences = Sequences(PLAIN, [257, 100], 16, torch.float16)
    q, kv = sequences.step([0, 1], [256, 99], [1, 1])
    found = []
    for programs in (512, 0):
        monkeypatch.setattr(paged, "PROGRAMS", programs)
        found.append(TABLE.primitive(api.PAGED_ATTENTION, PLAIN)(q, kv, None))
    assert torch.equal(*found)


def test_large_queries_are_not_cut() -> None:
    """A query beyond the largest float16 number and a query of zeros."""
    sequences = Sequences(replace(PLAIN, scale=1e-7), [63, 63], 16, torch.float16)
    sequences.q[0] *= 1e6
    sequences.q[1] *= 0
    assert sequences.error([0, 1], [62, 62], [1, 1]) < 1e-5


def test_pages_in_float32_take_the_definition() -> None:
    sequences = Sequences(PLAIN, [40], 16, torch.float32)
    assert sequences.error([0], [39], [1]) < 1e-5


def test_patterns_and_large_heads_are_refused_with_a_reason() -> None:
    for case, reason in [
        (replace(ODD, pattern=Strided(3)), "no kernel reads a pattern of keys"),
        (Attention(1, 1, 256, 1.0), "heads have 256 numbers; kernels take 128 at most"),
        (Attention(64, 1, 64, 1.0), "64 heads share a head of keys; kernels take 16 at most"),
    ]:
        assert dict(TABLE.choose(api.PAGED_ATTENTION, case).refusals)["triton"] == reason
