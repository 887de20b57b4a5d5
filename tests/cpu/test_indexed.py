"""Keys that an indexer selects, on all backends of the host: against the definition, query by query in float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ridgeline.ops import api, open_table
from ridgeline.ops.api import DenseRows, PagedLayout, PagedRows
from ridgeline.spec import IndexedAttention, Indexer, LatentAttention, LayerNorm, RMSNorm

TOP, HEADS, SIZE, PAGE = 20, 5, 12, 16
LATENT = LatentAttention(3, 24, 10, 8, 14, 18**-0.5, RMSNorm(1e-6), q_lora_rank=9)
CASE = IndexedAttention(LATENT, Indexer(HEADS, SIZE, TOP, LayerNorm(1e-6)))
DEVICES = pytest.mark.parametrize("device", ["cpu", "reference", "numpy"])


def table_of(device: str) -> Any:
    if device == "numpy":
        from ridgeline.ops.host.backend import NumpyBackend
        from ridgeline.ops.host.memory import NumpyMemory
        from ridgeline.ops.table import OpsTable

        return OpsTable(NumpyMemory(), (NumpyBackend(),))
    return open_table(device)


class Sequence:
    """A sequence of n tokens, and the exact choice and result of each of its queries."""

    def __init__(self, n: int, *, ties: bool, seed: int = 0) -> None:
        rng = np.random.default_rng([n, ties, seed])
        draw = (lambda *s: rng.integers(-1, 2, s)) if ties else (lambda *s: rng.normal(size=s))
        self.q, self.weights, self.keys = draw(n, HEADS, SIZE), draw(n, HEADS), draw(n, 1, SIZE)
        self.queries, self.latents = rng.normal(size=(n, 3, 18)), rng.normal(size=(n, 1, LATENT.row))
        self.kv_b = np.random.default_rng(7).normal(size=(3, 24, 24)) * 24**-0.5
        for name in ("q", "weights", "keys", "queries", "latents", "kv_b"):
            setattr(self, name, getattr(self, name).astype(np.float32))

    def choice(self, t: int) -> list[int]:
        q, keys = self.q[t].astype(np.float64), self.keys[: t + 1, 0].astype(np.float64)
        scores = self.weights[t].astype(np.float64) @ np.maximum(q @ keys.T, 0.0)
        return sorted(sorted(range(t + 1), key=lambda s: (-scores[s], s))[:TOP])

    def result(self, t: int) -> np.ndarray:
        rows = self.latents[self.choice(t), 0].astype(np.float64)
        out = []
        for q, up in zip(self.queries[t].astype(np.float64), self.kv_b.astype(np.float64), strict=True):
            keys = np.concatenate((rows[:, :24] @ up[:10].T, rows[:, 24:]), 1)
            powers = np.exp((scores := keys @ q * LATENT.scale) - scores.max())
            out.append(powers @ (rows[:, :24] @ up[10:].T) / powers.sum())
        return np.concatenate(out)


def attend(table: Any, s: Sequence, rows: Any, some: slice = slice(None)) -> tuple[Any, np.ndarray, np.ndarray]:
    def put(x: np.ndarray) -> Any:
        return table.memory.put(np.ascontiguousarray(x), "float32", "float32")

    chosen = table.primitive(api.SELECT_KEYS, CASE)(put(s.q[some]), put(s.weights[some]), rows)
    found = table.primitive(api.INDEXED_ATTENTION, CASE)(put(s.queries[some]), rows, put(s.kv_b), chosen)
    ids, counts = np.asarray(chosen.ids), np.asarray(chosen.counts)
    return [sorted(row[:k].tolist()) for row, k in zip(ids, counts, strict=True)], counts, np.asarray(found)


def dense(table: Any, s: Sequence) -> DenseRows:
    parts = tuple(table.memory.put(x, "float32", "float32") for x in (s.latents, s.keys))
    return DenseRows(parts, (len(s.q),))


@DEVICES
@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("n", [1, 20, 21, 63, 100, 257])
def test_the_choice_and_the_result_are_those_of_the_definition(device: str, n: int, ties: bool) -> None:
    table, s = table_of(device), Sequence(n, ties=ties)
    ids, counts, found = attend(table, s, dense(table, s))
    assert counts.tolist() == [min(t + 1, TOP) for t in range(n)]
    assert ids == [s.choice(t) for t in range(n)]
    assert np.abs(found - np.stack([s.result(t) for t in range(n)])).max() < 2e-5


def paged(s: Sequence, start: int, page: int) -> PagedRows:
    """Return the state in pages of a step that computes the tokens from `start` on; all other slots are NaN."""
    n, count = len(s.q), -(-len(s.q) // page)
    table = np.random.default_rng(3).permutation(count).astype(np.int64)[None] + 1
    parts = tuple(np.full((count + 2, page, *x.shape[1:]), np.nan, np.float32) for x in (s.latents, s.keys))
    at = np.arange(n)
    for part, x in zip(parts, (s.latents, s.keys), strict=True):
        part[table[0, at // page], at % page] = x

    def no_buckets() -> Any:
        raise AssertionError("kernels read page tables")

    new = np.arange(start, n)
    layout = PagedLayout(table[0, new // page], new % page, np.array([start]), np.array([n - start]), table, no_buckets)
    return PagedRows(parts, layout)


@pytest.mark.parametrize("n", [1, 20, 63, 100, 257])
def test_pages_chunks_and_poison_change_no_bit(n: int) -> None:
    """Kernels of the cpu: pages of any size, chunks from any token on, and slots that nobody wrote."""
    table, s = table_of("cpu"), Sequence(n, ties=False)
    whole = attend(table, s, dense(table, s))
    for page in (1, 7, 16, 64):
        for start in {0, n // 2, n - 1}:
            ids, _, found = attend(table, s, paged(s, start, page), slice(start, None))
            assert ids == whole[0][start:]
            assert found.tobytes() == whole[2][start:].tobytes()


def test_all_keys_have_the_bits_of_attention_without_an_indexer() -> None:
    table, s = table_of("cpu"), Sequence(TOP, ties=False)
    plain = table.primitive(api.LATENT_ATTENTION, LATENT)(s.queries, DenseRows((s.latents,), (TOP,)), s.kv_b)
    assert attend(table, s, dense(table, s))[2].tobytes() == np.asarray(plain).tobytes()


def test_a_tree_of_drafts_selects_among_its_path() -> None:
    """Two drafts after 30 known tokens, siblings: each sees the known tokens and itself."""
    table, s = table_of("cpu"), Sequence(32, ties=False)
    rows = paged(s, 30, PAGE)
    tree = PagedRows(rows.parts, replace(rows.layout, paths=np.array([1, 2])))
    ids, _, _ = attend(table, s, tree, slice(30, None))
    for t in (30, 31):
        keep = [*range(30), t]
        scores = s.weights[t].astype(np.float64) @ np.maximum(s.q[t].astype(np.float64) @ s.keys[keep, 0].T, 0.0)
        best = sorted(range(31), key=lambda k, scores=scores: (-scores[k], k))[:TOP]
        assert ids[t - 30] == sorted(keep[k] for k in best)


def test_plan_counts_the_indexer_and_the_chosen_keys() -> None:
    state, work = CASE.state(), CASE.work(1, 1000)
    assert state.parts == ((1, LATENT.row), (1, SIZE))
    assert work == 1000 * HEADS * (SIZE + 1) + TOP * 3 * (LATENT.row + 24)
    assert CASE.work(300, 300) == sum(CASE.work(1, t) for t in range(1, 301))
