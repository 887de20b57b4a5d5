"""Every primitive in numpy equals its definition in torch. test_host_recurrent.py has those
that run along sequences.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from oracle.problems import NUMPY, REFERENCE, SIZES, STORED, Array, Problem, check, each, expert_weights, normal, run
from ridgeline.ops import OpsTable, api
from ridgeline.ops.api import Bucket, DenseKeyValues, DenseRows, PagedKeyValues, PagedRows
from ridgeline.ops.host import attention
from ridgeline.ops.host.memory import ALIGNMENT, NumpyMemory, widen
from ridgeline.ops.host.stored import keys_of, values_of
from ridgeline.ops.reference.backend import TorchMemory
from ridgeline.runtime.layout import Slices, build_layout
from ridgeline.spec import (
    MLP,
    XIELU,
    Activation,
    Attention,
    Blocks,
    Chunked,
    ClampedSwiGLU,
    Dilated,
    ExpertGroups,
    FirstTokens,
    GatedDelta,
    GatedMLP,
    KimiDelta,
    LatentAttention,
    LayerNorm,
    Mamba2,
    MoE,
    QueryGrowth,
    RMSNorm,
    Rope,
    SparseMixer,
    Strided,
    Ungated,
    WholeSequence,
)

MEMORY = NumpyMemory()
NUMPY_TABLE = OpsTable(MEMORY, (NUMPY,))
REFERENCE_TABLE = OpsTable(TorchMemory("reference"), (REFERENCE,))


# ---- problems --------------------------------------------------------------------------------------------------------


def token_by_token(n: int) -> Iterator[Problem]:
    x, wide = normal(n, 24), normal(3, n)
    for norm in (RMSNorm(1e-2), RMSNorm(1e-6, offset=1.0)):
        yield Problem(api.NORM, norm, (wide, normal(n, seed=1), None))
    yield Problem(api.NORM, LayerNorm(1e-2), (wide, normal(n, seed=1), normal(n, seed=2)), 1e-5)
    positions = np.arange(n) * 37
    yield Problem(api.ROTARY, None, (np.arange(n), normal(9) ** 2, 1.2), 3e-5)  # float32 angles of up to 2,000
    for rope, heads in ((Rope(8), 3), (Rope(6, interleaved=True), 2)):
        angle = positions[:, None] * 0.1 ** np.arange(rope.dim // 2)
        table = api.Rotary(np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32))
        yield Problem(api.ROPE, rope, (normal(n, heads, 8), table))
    yield Problem(api.SPLIT_HEADS, None, (x, 4))
    yield Problem(api.ADD, None, (x, normal(n, 24, seed=1), 1.0))
    yield Problem(api.ADD, None, (x, normal(n, 24, seed=1), 0.3))
    yield Problem(api.SCALE, None, (x, 1.7))
    yield Problem(api.SOFTCAP, None, (5 * x, 3.0))
    yield Problem(api.CLAMP, None, (5 * x, 3.0))
    yield Problem(api.XIELU, XIELU(), (3 * x, normal(1), normal(1, seed=1)))
    yield Problem(api.GROW_QUERIES, QueryGrowth(0.3, 20, 1), (normal(n, 2, 3), np.arange(n)))
    yield Problem(api.GROW_QUERIES, QueryGrowth(0.3, 20, 1, "power"), (normal(n, 2, 3), np.arange(n)))
    yield Problem(api.NORM, LayerNorm(0.3, bias=False, offset=0.5), (x, normal(24), None))
    for own in (Attention(3, 1, 8, 0.6, out_gate=True, gate_over="head"),
                Attention(3, 1, 8, 0.6, out_gate=True, gate_act="softplus")):  # fmt: skip
        yield Problem(api.ATTENTION_GATE, own, (x, normal(n, 3 if own.gate_over == "head" else 24, seed=2)))
    own = Attention(3, 1, 8, 0.6, out_gate=True, gate_bias=True)
    yield Problem(api.ATTENTION_GATE, own, (x, normal(n, 24, seed=2), normal(3, seed=3)))
    for moe in (MoE(6, 2, 8, scores=SparseMixer(0.2)), MoE(6, 2, 8, scores="sigmoid", rates_logits=True)):
        yield Problem(api.ROUTE, moe, (normal(n, 6), *([normal(6)] if moe.rates_logits else [])))
    yield Problem(api.MIX, None, (x, normal(24, 5, seed=1)), 1e-5)
    yield Problem(api.MULTIPLY, None, (x, normal(1, seed=1)))
    yield Problem(api.MULTIPLY, None, (x, normal(n, 24, seed=1)))
    yield Problem(api.GATE, None, (x, 5 * normal(n, 24, seed=1)))
    yield Problem(api.SIGMOID_GATE, None, (x, 5 * normal(n, 24, seed=1)))
    yield Problem(api.SIGMOID_GATE, None, (x, 5 * normal(n, 1, seed=1)))
    yield Problem(api.TAKE, None, (x, np.array([n - 1, 0, n // 2])))
    yield Problem(api.TAKE, None, (x, np.array([[n - 1, 0], [n // 2, 0]])))
    yield Problem(api.CUT, None, (x, 5, 17))
    yield Problem(api.JOIN, None, (x, normal(n, 7)))
    yield Problem(api.SPLIT, None, (x, (5, 12, 7)))
    yield Problem(api.GATHER, None, ([normal(2, n, 5), normal(1, n, 5)], 2, np.arange(3 * n)[::-1].copy()))
    yield Problem(api.GATHER, None, ([normal(n, 5)], 1, np.arange(n)))
    yield Problem(api.GATHER, None, ([normal(n, 5), normal(2, 5)], 1, np.array([[n + 1, 0], [n, n - 1]])))
    for delta in (GatedDelta(4, 2, 5, 6, 4, RMSNorm(1e-2, offset=0.5)), KimiDelta(4, 6, 4, 3, RMSNorm(1e-2))):
        yield Problem(api.NORM_GATE, delta, (x, 5 * x[::-1].copy(), normal(6)))
    yield Problem(api.GATED_NORM, Mamba2(4, 6, 5, 2, 4, RMSNorm(1e-2, offset=0.5)), (x, x[::-1].copy(), normal(24)))
    for name in ("silu", "gelu", "gelu_tanh", "relu", "relu2"):
        kind: Activation = name  # type: ignore[assignment]
        yield Problem(api.ACTIVATION, MLP(8, kind), (3 * x,))
        yield Problem(api.ACTIVATION, GatedMLP(8, kind), (3 * x, normal(n, 24, seed=1)))
        yield Problem(api.ACTIVATION, MoE(2, 1, 8, Ungated(kind)), (3 * x,))
    yield Problem(api.ACTIVATION, MoE(2, 1, 8, ClampedSwiGLU(1.3, 2.0)), (3 * x, 3 * normal(n, 24, seed=1)), 1e-5)


def matrices(n: int) -> Iterator[Problem]:
    for dtype in STORED:
        weight = normal(63, n, dtype=dtype)
        yield Problem(api.EMBEDDING, None, (normal(n, 33, dtype=dtype), np.arange(50) % n))
        yield Problem(api.LINEAR, None, (normal(5, n), weight, None), 1e-5)
        yield Problem(api.LINEAR, None, (normal(1, n), weight, normal(63)), 1e-5)
        yield Problem(api.LINEAR, None, (normal(2, 3, n), weight, normal(63)), 1e-5)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("problems", [token_by_token, matrices])
def test_it_is_the_definition(problems: Callable[[int], Iterator[Problem]], size: int) -> None:
    for problem in problems(size):
        check(problem)


EXPERTS = (MoE(7, 2, 20), MoE(64, 8, 5, ClampedSwiGLU(1.3, 0.8)), MoE(7, 2, 20, Ungated("relu2")), MoE(1, 1, 9))


@pytest.mark.parametrize("dtype", STORED)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("case", EXPERTS, ids=str)
def test_experts_are_the_definition(case: MoE, size: int, dtype: str) -> None:
    ids = np.sort(np.argsort(normal(size, case.num_experts), -1)[:, : case.num_experts_per_tok], -1)
    x, scores, inner = normal(size, 11), normal(size, case.num_experts_per_tok), case.intermediate_size
    shapes = (inner, 11), (inner, 11), (11, inner)
    stack: list[Any] = [normal(case.num_experts, *s, seed=i, dtype=dtype) for i, s in enumerate(shapes)]
    biases: list[Any] = [normal(case.num_experts, w.shape[1], seed=4) for w in stack]
    if not case.gated:
        stack[0] = biases[0] = None
    for b in (None, biases):
        got = NUMPY_TABLE.stage(api.EXPERT_BLOCK, case, expert_weights(stack, b, NUMPY_TABLE))(x, ids, scores)
        wide = [None if w is None else torch.from_numpy(w.astype(np.float64)) for w in (*stack, *(b or [None] * 3))]
        weights = expert_weights(wide[:3], b and wide[3:], REFERENCE_TABLE)
        given = [torch.from_numpy(a) for a in (x.astype(np.float64), ids, scores.astype(np.float64))]
        wanted = REFERENCE_TABLE.stage(api.EXPERT_BLOCK, case, weights)(*given).numpy()
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5 * np.abs(wanted).max())


ROUTES = {
    "plain": MoE(16, 4, 8),
    "over all": MoE(16, 4, 8, normalize=False),
    "sigmoid, biased": MoE(16, 4, 8, scores="sigmoid", choice_bias=True, scale=2.5),
    "best groups": MoE(16, 4, 8, normalize=False, groups=ExpertGroups(4, 2, "best")),
    "best pairs": MoE(16, 4, 8, scores="sigmoid", choice_bias=True, groups=ExpertGroups(4, 2, "best_two")),
}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", ROUTES)
def test_ties_between_experts_go_as_in_the_definition(name: str, size: int) -> None:
    """Most choices among logits of few values are ties, and the first of equal experts is taken."""
    case = ROUTES[name]
    logits = np.round(normal(size, 16))
    args: tuple[Any, ...] = (logits, np.round(normal(16)) / 4) if case.choice_bias else (logits,)
    wanted_ids, wanted = REFERENCE.primitive(api.ROUTE, case)(*each(args, torch.from_numpy))
    ids, weights = run(Problem(api.ROUTE, case, args))
    np.testing.assert_array_equal(ids, wanted_ids.numpy())
    np.testing.assert_allclose(weights, wanted.numpy(), rtol=0, atol=1e-6)


def test_a_broken_router_shows() -> None:
    """NaN among the logits gives NaN weights, so that the error is visible."""
    logits = normal(3, 16)
    logits[1, 5] = np.nan
    _, weights = NUMPY.primitive(api.ROUTE, ROUTES["plain"])(logits)
    assert np.isfinite(weights[[0, 2]]).all() and np.isnan(weights[1]).all()


# ---- attention -------------------------------------------------------------------------------------------------------

ATTENTION = [
    Attention(4, 4, 16, 0.25),
    Attention(6, 2, 5, 0.6),
    Attention(4, 1, 24, 0.2, window=24),
    Attention(2, 2, 8, 0.6, window=1),
    Attention(4, 2, 8, 0.6, window=100, softcap=3.0),
    Attention(6, 2, 8, 0.6, sinks=True),
    Attention(4, 1, 8, 0.6, window=24, softcap=3.0, sinks=True),
    Attention(6, 2, 8, 0.6, alibi=8.0),
    Attention(4, 1, 8, 0.6, window=24, softcap=3.0, sinks=True, alibi=4.0),
    Attention(4, 2, 8, 0.6, window=9, pattern=FirstTokens(4)),
    Attention(4, 2, 8, 0.6, window=9, pattern=Dilated(5)),
    Attention(4, 2, 8, 0.6, window=9, pattern=Strided(11), sinks=True),
    Attention(4, 2, 8, 0.6, window=9, pattern=Chunked()),
    Attention(4, 2, 8, 0.6, sight=Blocks(10)),
    Attention(4, 1, 8, 0.6, sinks=True, sight=WholeSequence()),
]
LATENT = [LatentAttention(3, 12, 5, 4, 7, 0.3, RMSNorm()), LatentAttention(4, 32, 16, 8, 20, 0.2, RMSNorm())]


def sinks_of(case: Attention) -> Array | None:
    return np.linspace(-30, 30, case.num_heads).astype(np.float32) if case.sinks else None


@pytest.mark.parametrize("lengths", [(1,), (63,), (100, 1, 63), (257,)], ids=str)
@pytest.mark.parametrize("case", ATTENTION, ids=str)
def test_dense_attention(case: Attention, lengths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = (normal(sum(lengths), h, case.head_dim) for h in (case.num_heads, case.num_kv_heads, case.num_kv_heads))
    problem = Problem(api.ATTENTION, case, (q, DenseKeyValues(k, v[::-1].copy(), lengths), sinks_of(case)))
    check(problem)
    monkeypatch.setattr(attention, "BLOCK", 500)  # so that a few queries are computed at a time
    check(problem)


@pytest.mark.parametrize("absorb", [True, False])
@pytest.mark.parametrize("lengths", [(1,), (100, 1, 63)], ids=str)
@pytest.mark.parametrize("case", LATENT, ids=str)
def test_dense_latent_attention(
    case: LatentAttention, lengths: tuple[int, ...], absorb: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LatentAttention, "absorbs", lambda self, tokens, context: absorb)
    q, rows, kv_b = latent_inputs(case, sum(lengths))
    check(Problem(api.LATENT_ATTENTION, case, (q, DenseRows((rows,), lengths), kv_b)))


def latent_inputs(case: LatentAttention, n: int) -> tuple[Array, Array, Array]:
    up = normal(case.num_heads, case.qk_nope_head_dim + case.v_head_dim, case.kv_lora_rank) * case.kv_lora_rank**-0.5
    return normal(n, case.num_heads, case.qk_head_dim), normal(n, 1, case.row), up


class Paged(NamedTuple):
    """Some tokens of three sequences in pages of any order; data that no query may read is NaN."""

    layout: api.PagedLayout
    parts: tuple[Array, ...]
    num_tokens: int


def paged(shapes: tuple[tuple[int, ...], ...], page_tokens: int, lookback: int, first_tokens: int) -> Paged:
    starts, lengths = np.array([0, 130, 70]), np.array([40, 1, 9])
    ends, rng = starts + lengths, np.random.default_rng(page_tokens)
    tables, free = np.zeros((3, 200), np.int64), rng.permutation(np.arange(1, 400)).tolist()
    parts = [np.full((400, page_tokens, *shape), np.nan, np.float32) for shape in shapes]
    for row, end in enumerate(ends):
        for index in range(-(-int(end) // page_tokens)):
            last_seen = (index + 1) * page_tokens > starts[row] - lookback
            if not last_seen and index * page_tokens >= first_tokens:
                continue  # this page was freed
            tables[row, index] = page = free.pop()
            for part in parts:
                part[page] = rng.normal(size=part.shape[1:])
                part[page, max(0, int(end) - index * page_tokens) :] = np.nan
    layout = build_layout(
        Slices.plain(np.arange(3), starts, lengths), tables, page_tokens, lookback, MEMORY, first_tokens
    )
    return Paged(layout, tuple(parts), int(lengths.sum()))


@pytest.mark.parametrize("page_tokens", [1, 16, 64])
@pytest.mark.parametrize("case", ATTENTION, ids=str)
def test_paged_attention(case: Attention, page_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    state = case.state()
    p = paged(state.parts, page_tokens, state.lookback, state.first_tokens)
    q = normal(p.num_tokens, case.num_heads, case.head_dim)
    problem = Problem(api.PAGED_ATTENTION, case, (q, PagedKeyValues(*p.parts, p.layout), sinks_of(case)))
    check(problem)
    monkeypatch.setattr(attention, "BLOCK", 500)
    check(problem)


@pytest.mark.parametrize("absorb", [True, False])
@pytest.mark.parametrize("page_tokens", [1, 16, 64])
@pytest.mark.parametrize("case", LATENT, ids=str)
def test_paged_latent_attention(
    case: LatentAttention, page_tokens: int, absorb: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LatentAttention, "absorbs", lambda self, tokens, context: absorb)
    state = case.state()
    p = paged(state.parts, page_tokens, state.lookback, state.first_tokens)
    q, _, up = latent_inputs(case, p.num_tokens)
    check(Problem(api.PAGED_LATENT_ATTENTION, case, (q, PagedRows(p.parts, p.layout), up)))


def test_infinities_of_one_sequence_are_its_own() -> None:
    case, lengths = Attention(4, 2, 8, 0.6), (30, 40)
    q, k, v = (normal(70, h, 8) for h in (4, 2, 2))
    attend = NUMPY.primitive(api.ATTENTION, case)
    clean = attend(q, DenseKeyValues(k, v, lengths))
    k[3], v[5] = np.inf, -np.inf
    dirty = attend(q, DenseKeyValues(k, v, lengths))
    np.testing.assert_array_equal(dirty[30:], clean[30:])
    assert not np.isfinite(dirty[5:30]).any()


def test_no_tokens() -> None:
    """A step without tokens has no layouts, but ops may get an empty array of rows."""
    x, none = normal(5, 8), np.empty(0, np.int64)
    rows = NUMPY.primitive(api.TAKE, None)(x, none)
    assert NUMPY.primitive(api.NORM, RMSNorm())(rows, normal(8), None).shape == (0, 8)
    for dtype in STORED:
        assert NUMPY.primitive(api.LINEAR, None)(rows, normal(6, 8, dtype=dtype), normal(6)).shape == (0, 6)


@pytest.mark.parametrize("page_tokens", [1, 16])
def test_pages_are_written_at_the_slots_of_tokens(page_tokens: int) -> None:
    whole = np.full((5, 4, page_tokens * 8), np.nan, np.float32)
    keys, values = (whole[:, i].reshape(5, page_tokens, 2, 4) for i in (1, 2))
    k, v, slots, where = normal(3, 2, 4), normal(3, 2, 4), np.array([0, page_tokens - 1, 0]), np.array([4, 2, 1])
    NUMPY.primitive(api.WRITE_PAGES, Attention(2, 2, 4, 1.0))((keys, values), (k, v), where, slots)
    np.testing.assert_array_equal(keys_of(keys).numbers[where, :, :, slots], k)
    np.testing.assert_array_equal(values_of(values).numbers[where, :, slots], v)
    assert np.isfinite(whole).sum() == k.size + v.size


def test_known_tokens_come_from_the_step_or_from_their_rows() -> None:
    tokens, sampled, rows = np.array([7, -1, -1, 0]), np.array([11, 12, 13]), np.array([0, 2, 0, 1])
    assert NUMPY.primitive(api.KNOWN_TOKENS, None)(tokens, sampled, rows).tolist() == [7, 13, 11, 0]
    same = REFERENCE.primitive(api.KNOWN_TOKENS, None)(*map(torch.from_numpy, (tokens, sampled, rows)))
    assert same.tolist() == [7, 13, 11, 0]


def test_all_primitives_are_served_and_no_stage() -> None:
    assert all(NUMPY.refuses(op, None) is None for op in api.PRIMITIVES)
    assert all(NUMPY.refuses(op, None) for op in api.STAGES)


# ---- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", STORED)
def test_every_narrow_number_is_widened_exactly(dtype: str) -> None:
    bits = np.arange(65536, dtype=np.uint16)
    x = bits.view(STORED[dtype]) if dtype != "float32" else normal(65536)
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(widen(x), x.astype(np.float32))
        finite = x[np.isfinite(x.astype(np.float32))]
        np.testing.assert_array_equal(widen(finite[::-3]), finite[::-3].astype(np.float32))


@pytest.mark.parametrize("to", STORED)
@pytest.mark.parametrize("stored", STORED)
def test_put(stored: str, to: str) -> None:
    x = normal(6, 5, dtype=stored)
    host = x.view(np.uint16) if stored == "bfloat16" else x
    got = MEMORY.put(host, stored, to)
    assert got.dtype == STORED[to] and np.shares_memory(got, host) == (stored == to)
    wanted = torch.from_numpy(x.astype(np.float32)).to(getattr(torch, to)).float().numpy()
    np.testing.assert_array_equal(widen(got), wanted)
    assert MEMORY.put(host.T, stored, to).flags.c_contiguous


@pytest.mark.parametrize("pages", [1, 7, 1000])
def test_pages_are_aligned_and_views_share_them(pages: int) -> None:
    room = MEMORY.pages(pages, 48)
    assert room.shape == (pages, 48) and room.ctypes.data % ALIGNMENT == 0
    for dtype, offset, size in (("float32", 12, 4), ("bfloat16", 12, 2), ("float16", 4, 2), ("int8", 8, 1)):
        room[:] = 0
        view = MEMORY.page_view(room, offset, (3, 2), dtype)
        view[...] = 1
        assert view.shape == (pages, 3, 2) and view.dtype.itemsize == size
        assert room[:, offset : offset + 6 * size].any() and (view == 1).all()
        assert not room[:, :offset].any() and not room[:, offset + 6 * size :].any()


def test_whole_pages_move() -> None:
    room = MEMORY.pages(5, 4)
    room[...] = np.arange(5)[:, None]
    MEMORY.copy_pages(room, [1, 2], [4, 3])
    out = MEMORY.pages_out(room, [3, 0])
    assert room[:, 0].tolist() == [0, 1, 2, 2, 1] and out[:, 0].tolist() == [2, 0]
    out[...] = 9.0
    assert room.max() == 2.0  # a copy
    MEMORY.pages_in(room, [0, 2], out)
    assert room[:, 3].tolist() == [9, 1, 9, 2, 1]


@pytest.mark.parametrize("dtype", STORED)
def test_noise_is_the_same_for_the_same_seed(dtype: Any) -> None:
    a, b, c = (widen(MEMORY.random((300, 200), dtype, 0.5, seed)) for seed in (1, 1, 2))
    np.testing.assert_array_equal(a, b)
    assert (a != c).mean() > 0.9
    assert abs(float(a.mean())) < 0.01 and math.isclose(float(a.std()), 0.5, rel_tol=0.02)


def test_a_bucket_is_cut_by_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows that are gathered at once from a bucket's pages are bounded, except for a single sequence."""
    monkeypatch.setattr(attention, "BLOCK", 1000)
    bucket = Bucket(*(np.zeros((7, n), np.int64) for n in (1, 1, 4, 4)))
    assert [len(part.rows) for part in attention.parts_of(bucket, 16, 8)] == [1] * 7
    assert [len(part.rows) for part in attention.parts_of(bucket, 4, 8)] == [7]
