"""Attention by kernels: close to float64, and the same bits for any layout of sequences, pages and threads."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.ops import api
from ridgeline.ops.api import DenseKeyValues, PagedLayout
from ridgeline.ops.reference import primitives
from ridgeline.ops.reference.backend import TorchMemory
from ridgeline.runtime.layout import Slices, build_layout
from ridgeline.spec import (
    ALL,
    Attention,
    Blocks,
    Dilated,
    FirstTokens,
    Sight,
    Strided,
    WholeSequence,
)
from ridgeline.spec.sight import CAUSAL

kernels = pytest.importorskip("ridgeline._kernels", reason="the kernels are not built: cmake -S . -B build")
from tests.oracle import attention_bounds as bounds  # noqa: E402

from cpu.instruction_sets import OTHERS, fingerprint_under  # noqa: E402
from cpu.test_tree_attention import results  # noqa: E402
from ridgeline.ops.cpu import attention as ours  # noqa: E402
from shares import daily  # noqa: E402

Array = np.ndarray[Any, Any]
NAN = float("nan")
POOLS = {n: kernels.Pool(n) for n in (1, 2, 4)}
LOOKS: list[dict[str, Any]] = [
    {}, {"window": 7}, {"window": 100, "sinks": True}, {"softcap": 2.0}, {"window": 20, "pattern": FirstTokens(3)},
    {"window": 9, "pattern": Dilated(5)}, {"window": 30, "pattern": Strided(17), "sinks": True, "softcap": 5.0},
    {"sight": Blocks(24)}, {"sight": WholeSequence(), "sinks": True},
]  # fmt: skip


def draw(case: Attention, tokens: int, seed: int) -> tuple[Array, Array, Array, Array | None]:
    rng = np.random.default_rng(seed)
    heads = (case.num_heads, case.num_kv_heads, case.num_kv_heads)
    q, k, v = (rng.standard_normal((tokens, h, case.head_dim), dtype=np.float32) for h in heads)
    return q, k, v, rng.standard_normal(case.num_heads, dtype=np.float32) if case.sinks else None


def dense(
    case: Attention, q: Array, k: Array, v: Array, sinks: Array | None, lengths: list[int], pool: int = 1
) -> Array:
    out = np.full((len(q), case.num_heads * case.head_dim), NAN, np.float32)
    ours.bind(case).dense(POOLS[pool], q, k, v, np.array(lengths, np.int64), sinks, out)
    return out


def definition(case: Attention, q: Array, k: Array, v: Array, sinks: Array | None, lengths: list[int]) -> Array:
    q64, k64, v64 = (torch.from_numpy(x).double() for x in (q, k, v))
    logits = None if sinks is None else torch.from_numpy(sinks).double()
    return primitives.attention(case)(q64, DenseKeyValues(k64, v64, tuple(lengths)), logits).numpy()  # type: ignore[arg-type]


def within(case: Attention, q: Array, k: Array, v: Array, sinks: Array | None, start: int, n: int) -> Array:
    """Return how far a sequence's results may be from the definition."""
    rows = slice(start, start + n)
    return bounds.attend(case, q[rows], k[rows], v[rows], sinks).bound.reshape(n, -1)


DIMS = (1, 8, 13, 64, 80, 128)
HEADS = [(heads, dim) for heads in ((1, 1), (4, 4), (9, 3), (8, 1), (64, 1)) for dim in DIMS]


@pytest.mark.parametrize(
    ("heads", "dim"), daily(HEADS, [x for x in HEADS if x[0] != (64, 1) or x[1] == 13], slow=False), ids=str
)
def test_whole_sequences(heads: tuple[int, int], dim: int) -> None:
    lengths = [1, 63, 100, 257]
    for look in LOOKS:
        case = Attention(*heads, dim, 1.2 * dim**-0.5, **look)
        given = draw(case, sum(lengths), dim)
        found, wanted = dense(case, *given, lengths), definition(case, *given, lengths)
        limit = np.concatenate(
            [within(case, *given, start, n) for start, n in zip(np.cumsum(lengths) - lengths, lengths, strict=True)]
        )
        assert (np.abs(found - wanted) <= limit).all(), look


class Pages:
    """An arena of one layer, its page tables, and an allocator that fills new and freed pages with NaN."""

    def __init__(self, case: Attention, page_tokens: int, rows: int, tokens: int, rng: np.random.Generator) -> None:
        self.case, self.size, self.state = case, page_tokens, case.state()
        count = sum(-(-tokens // page_tokens) for _ in range(rows)) + 1
        # The layer's part is one of several in a page.
        whole = np.full((count, page_tokens, 5, case.num_kv_heads, case.head_dim), NAN, np.float32).reshape(count, -1)
        shape, part = (count, page_tokens, case.num_kv_heads, case.head_dim), whole.shape[1] // 5
        self.keys, self.values = whole[:, part : 2 * part].reshape(shape), whole[:, 3 * part : 4 * part].reshape(shape)
        assert self.keys.base is not None
        self.tables = np.zeros((rows, -(-tokens // page_tokens) + 2), np.int64)
        self.free = rng.permutation(np.arange(1, count)).tolist()

    def layout(self, row: Array, start: Array, count: Array) -> PagedLayout:
        for r, a, n in zip(row, start, count, strict=True):
            for index in range(a // self.size, (a + n - 1) // self.size + 1):
                self.tables[r, index] = self.tables[r, index] or self.free.pop()
        lookback, first = self.state.lookback, self.state.first_tokens
        return build_layout(
            Slices.plain(row, start, count), self.tables, self.size, lookback, TorchMemory("cpu"), first
        )

    def drop_unread(self, row: int, position: int) -> None:
        first = -(-self.state.first_tokens // self.size)
        for index in range(first, max(0, position - self.state.lookback) // self.size):
            page, self.tables[row, index] = self.tables[row, index], 0
            self.keys[page] = self.values[page] = NAN
            if page:
                self.free.append(page)


def step(pages: Pages, layout: PagedLayout, q: Array, k: Array, v: Array, sinks: Array | None, pool: int) -> Array:
    case = pages.case
    write = ours.write_pages(case, POOLS[pool])
    write((pages.keys, pages.values), (k, v), np.asarray(layout.write_pages), np.asarray(layout.write_slots))
    out = np.full((len(q), case.num_heads * case.head_dim), NAN, np.float32)
    where = [np.asarray(x) for x in (layout.starts, layout.lengths, layout.tables)]
    ours.bind(case).paged(POOLS[pool], q, pages.keys, pages.values, *where, sinks, out)
    return out


def run_chunks(case: Attention, page_tokens: int, lengths: list[int], seed: int, pool: int, longest: int) -> None:
    """Check that random chunks of all sequences, in random batches, give the bits of whole sequences."""
    rng = np.random.default_rng(seed)
    q, k, v, sinks = draw(case, sum(lengths), seed)
    pages = Pages(case, page_tokens, len(lengths), max(lengths), rng)
    offsets, done, out = np.cumsum(lengths) - lengths, np.zeros(len(lengths), np.int64), None
    out = np.full((len(q), case.num_heads * case.head_dim), NAN, np.float32)
    rows = rng.permutation(len(lengths))
    while (done < lengths).any():
        chosen = np.array([i for i, n in enumerate(lengths) if done[i] < n and rng.random() < 0.7], np.int64)
        if not len(chosen):
            continue
        wanted = -(-rng.integers(1, longest, len(chosen)) // case.sight.block) * case.sight.block
        counts = np.minimum(np.array(lengths)[chosen] - done[chosen], wanted)
        layout = pages.layout(rows[chosen], done[chosen], counts)
        tokens = np.concatenate([offsets[i] + done[i] + np.arange(c) for i, c in zip(chosen, counts, strict=True)])
        out[tokens] = step(pages, layout, q[tokens], k[tokens], v[tokens], sinks, pool)
        done[chosen] += counts
        for i in chosen:
            pages.drop_unread(int(rows[i]), int(done[i]))
    np.testing.assert_array_equal(out, dense(case, q, k, v, sinks, lengths))


@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(
    heads=st.sampled_from([(1, 1), (4, 4), (6, 2), (14, 2), (8, 1)]),
    dim=st.sampled_from([3, 16, 40]),
    window=st.sampled_from([None, 1, 2, 7, 24, 200]),
    softcap=st.sampled_from([None, 2.0]),
    sinks=st.booleans(),
    pattern=st.none()
    | st.builds(FirstTokens, st.integers(1, 40))
    | st.builds(Dilated, st.integers(1, 9))
    | st.builds(Strided, st.integers(1, 30)),
    sight=st.sampled_from([CAUSAL, CAUSAL, Blocks(1), Blocks(4), Blocks(7), Blocks(64)]),
    page_tokens=st.sampled_from([1, 3, 4, 8, 16, 64]),
    lengths=st.lists(st.integers(1, 200), min_size=1, max_size=6),
    pool=st.sampled_from([1, 2, 4]),
    seed=st.integers(0, 2**16),
)
def test_chunks_pages_batches_and_threads_change_no_bit(
    heads: tuple[int, int], dim: int, window: int | None, softcap: float | None, sinks: bool, pattern: Any,
    sight: Sight, page_tokens: int, lengths: list[int], pool: int, seed: int,
) -> None:  # fmt: skip
    window = window if sight == CAUSAL else None
    pattern = pattern if window else None
    case = Attention(*heads, dim, 0.3, window=window, softcap=softcap, sinks=sinks, pattern=pattern, sight=sight)
    run_chunks(case, page_tokens, lengths, seed, pool, 60)


@pytest.mark.parametrize("page_tokens", [1, 16, 64])
@pytest.mark.parametrize(
    "look", [{}, {"window": 700}, {"window": 600, "pattern": FirstTokens(70)}, {"sight": Blocks(96)}], ids=str
)
def test_contexts_of_many_segments(look: dict[str, Any], page_tokens: int) -> None:
    run_chunks(Attention(6, 2, 16, 0.3, **look), page_tokens, [1500, 700, 40], page_tokens, 4, 600)


@pytest.mark.parametrize("case", [Attention(3, 1, 64, 0.125), Attention(16, 8, 128, 0.09)], ids=["one head", "many"])
def test_one_token_after_eight_thousand(case: Attention) -> None:
    """A long context is split over the threads, and the merged result has the bits of one thread."""
    tokens = 8192
    q, k, v, _ = draw(case, tokens, 0)
    pages = Pages(case, 16, 1, tokens, np.random.default_rng(0))
    row, last = np.zeros(1, np.int64), np.array([tokens - 1])
    before = pages.layout(row, row, last)
    where = np.asarray(before.write_pages), np.asarray(before.write_slots)
    ours.write_pages(case, POOLS[2])((pages.keys, pages.values), (k[:-1], v[:-1]), *where)
    layout = pages.layout(row, last, np.ones(1, np.int64))
    found = [step(pages, layout, q[-1:], k[-1:], v[-1:], None, pool) for pool in POOLS]
    assert all(np.array_equal(found[0], other) for other in found)
    groups = case.num_heads // case.num_kv_heads
    keys, values = (np.repeat(x, groups, 1).astype(np.float64) for x in (k, v))
    scores = np.einsum("hd,shd->hs", q[-1].astype(np.float64), keys) * case.scale
    weights = np.exp(scores - scores.max(1, keepdims=True))
    wanted = np.einsum("hs,shd->hd", weights / weights.sum(1, keepdims=True), values)
    np.testing.assert_allclose(found[0].reshape(wanted.shape), wanted, rtol=0, atol=1e-6)


@pytest.mark.parametrize("at", range(94, 107))  # at each position in a block of rows
def test_one_bad_token_affects_no_other(at: int) -> None:
    case, lengths = Attention(4, 2, 16, 0.3), [70, 150, 5]
    q, k, v, _ = draw(case, 225, 3)
    clean = dense(case, q, k, v, None, lengths)
    for bad in (np.inf, -np.inf, NAN):
        for x in (q, k, v):
            kept = x[at].copy()
            x[at] = bad
            dirty = dense(case, q, k, v, None, lengths)
            x[at] = kept
            unharmed = np.r_[:at, 220:225]  # earlier positions, and the other sequences
            assert np.array_equal(dirty[unharmed], clean[unharmed])
            assert x is q or not np.isfinite(dirty[at]).all()


def test_views() -> None:
    """Queries, keys and values may be columns of one matrix; an array that is not dense behind its first axis is
    refused.
    """
    case, lengths = Attention(4, 2, 16, 0.3), [9, 20]
    rng = np.random.default_rng(0)
    fused = rng.standard_normal((29, 8 * 16 + 3), dtype=np.float32)
    q, k, v = (fused[:, a : a + n * 16].reshape(29, n, 16) for a, n in ((1, 4), (65, 2), (97, 2)))
    assert q.base is not None
    found = dense(case, q, k, v, None, lengths)
    assert np.array_equal(found, dense(case, q.copy(), k.copy(), v.copy(), None, lengths))
    with pytest.raises(ValueError, match="must be dense"):
        dense(case, q[:, :, ::-1], k, v, None, lengths)


def test_no_tokens() -> None:
    case = Attention(4, 2, 16, 0.3)
    q, k, v, _ = draw(case, 0, 0)
    assert dense(case, q, k, v, None, []).shape == (0, 64)
    pages = Pages(case, 4, 1, 8, np.random.default_rng(0))
    none = np.zeros(0, np.int64)
    ours.bind(case).paged(
        POOLS[1],
        q,
        pages.keys,
        pages.values,
        none,
        none,
        np.zeros((0, 2), np.int64),
        None,
        np.empty((0, 64), np.float32),
    )
    ours.write_pages(case, POOLS[1])((pages.keys, pages.values), (k, v), none, none)


def test_bad_arguments_are_errors() -> None:
    case = Attention(4, 2, 16, 0.3)
    q, k, v, _ = draw(case, 3, 0)
    pages = Pages(case, 4, 1, 8, np.random.default_rng(0))
    one, three = np.zeros(1, np.int64), np.full(1, 3)
    out = np.empty((3, 64), np.float32)

    def attend(starts: Array, lengths: Array, tables: Array) -> None:
        ours.bind(case).paged(POOLS[1], q, pages.keys, pages.values, starts, lengths, tables, None, out)

    with pytest.raises(IndexError, match="page 99 is not"):
        attend(one, three, np.array([[99]]))
    with pytest.raises(ValueError, match="longer than its page table"):
        attend(one + 2, three, np.array([[1]]))
    with pytest.raises(ValueError, match="add up to 2, not to the 3"):
        attend(one, three - 1, np.array([[1]]))
    with pytest.raises(ValueError, match="add up to"):
        dense(case, q, k, v, None, [1, 1])
    with pytest.raises(ValueError, match="required"):
        dense(case, q, k[:2], v, None, [3])
    with pytest.raises(TypeError):
        dense(case, q.astype(np.float64), k, v, None, [3])
    write = ours.write_pages(case, POOLS[1])
    with pytest.raises(IndexError, match="slot 4 is not"):
        write((pages.keys, pages.values), (k, v), np.ones(3, np.int64), np.arange(2, 5))


@pytest.mark.parametrize("page_tokens", [1, 3, 16])
def test_writing_touches_the_written_slots_only(page_tokens: int) -> None:
    case = Attention(2, 2, 5, 1.0)
    pages = Pages(case, page_tokens, 4, page_tokens, np.random.default_rng(0))
    _, k, v, _ = draw(case, 3, 0)
    slots = np.array([0, page_tokens - 1, 0])
    ours.write_pages(case, POOLS[2])((pages.keys, pages.values), (k, v), np.array([4, 2, 1]), slots)
    keys = pages.keys.reshape(5, 2, 5, page_tokens)  # in the layout of the kernels
    values = pages.values.reshape(5, 2, page_tokens, 5)
    for i, (page, slot) in enumerate(zip([4, 2, 1], slots, strict=True)):
        assert np.array_equal(keys[page, :, :, slot], k[i]) and np.array_equal(values[page, :, slot], v[i])
    assert np.isfinite(keys).sum() == np.isfinite(values).sum() == k.size


def fingerprint() -> bytes:
    """Return results that must not depend on the instruction set."""
    outputs = []
    for look in LOOKS:
        case = Attention(9, 3, 24, 0.3, **look)
        outputs.append(dense(case, *draw(case, 257, 1), [150, 107]))
        run_chunks(case, 4, [150, 107], 1, 2, 40)
    return np.concatenate([*(x.ravel() for x in outputs), results()]).tobytes()


@pytest.mark.parametrize("isa", OTHERS)
def test_instruction_sets(isa: str) -> None:
    theirs, mine = (
        np.frombuffer(x, np.float32) for x in (fingerprint_under(isa, "test_kernels_attention"), fingerprint())
    )
    if isa == "portable":  # the portable set may round products before they are added
        np.testing.assert_allclose(theirs, mine, rtol=1e-5, atol=1e-5)
    else:
        assert np.array_equal(theirs, mine)


def test_all_kernels_are_listed() -> None:
    assert {api.WRITE_PAGES, api.MOVE_ROWS, api.PAGED_ATTENTION, api.ATTENTION} <= set(ours.KERNELS)
    assert Attention(1, 1, 1, 1.0).state().lookback == ALL
