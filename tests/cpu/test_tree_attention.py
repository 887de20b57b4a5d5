"""Attention with a tree of drafts: each draft has the result of its path alone, computed as a chain."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.ops import api
from ridgeline.ops.api import PagedKeyValues, PagedLayout, PagedRows
from ridgeline.ops.host.backend import NumpyBackend
from ridgeline.ops.host.memory import NumpyMemory
from ridgeline.ops.reference.backend import ReferenceBackend, TorchMemory
from ridgeline.runtime.layout import Slices, build_layout
from ridgeline.spec import Attention, Dilated, FirstTokens, LatentAttention, RMSNorm, Strided
from ridgeline.spec.storage import UNSCALED
from ridgeline.spec.trees import depths, paths

kernels = pytest.importorskip("ridgeline._kernels", reason="the kernels are not built: cmake -S . -B build")

from ridgeline.ops.cpu.primitives import KERNELS  # noqa: E402

Array = np.ndarray[Any, Any]
Case = Attention | LatentAttention
POOLS = {n: kernels.Pool(n) for n in (1, 2, 4)}
LATENT = LatentAttention(8, 24, 8, 8, 8, 0.3, RMSNorm())
CASES: dict[str, Case] = {
    "many heads": Attention(4, 4, 16, 0.3, sinks=True),
    "grouped": Attention(6, 2, 24, 0.3, softcap=2.0),
    "one key head": Attention(14, 1, 13, 0.3),
    "window": Attention(4, 2, 16, 0.3, window=5),
    "first tokens": Attention(4, 2, 16, 0.3, window=4, pattern=FirstTokens(3)),
    "dilated": Attention(4, 2, 16, 0.3, window=4, pattern=Dilated(3)),
    "strided": Attention(4, 2, 16, 0.3, window=3, pattern=Strided(5), sinks=True),
    "slopes": Attention(6, 2, 16, 0.3, alibi=8.0),
    "latents": LATENT,
}
COMPILED = [name for name in CASES if name != "slopes"]  # numpy and torch compute the other
DTYPES = ("float32", "bfloat16", "float16", "int8", "fp8")


def random_tree(rng: np.random.Generator, size: int) -> list[int]:
    """Return the parents of a tree: a chain, a star, or one whose drafts follow a random or a recent draft."""
    kind = rng.integers(4)
    if kind == 0:
        return list(range(-1, size - 1))
    if kind == 1:
        return [-1] * size
    low = [max(-1, i - 4) if kind == 2 else -1 for i in range(size)]
    return [int(rng.integers(low[i], i)) for i in range(size)]


class Rig:
    """A layer's pages on one device, and steps over them."""

    def __init__(self, device: str, case: Case, dtype: Any, page_tokens: int, pool: int = 1) -> None:
        self.device, self.case, self.pool, self.size = device, case, POOLS[pool], page_tokens
        self.memory = TorchMemory("reference") if device == "reference" else NumpyMemory()
        self.backend = ReferenceBackend() if device == "reference" else NumpyBackend()
        row = [case.row] if isinstance(case, LatentAttention) else [case.head_dim] * 2
        self.heads = 1 if isinstance(case, LatentAttention) else case.num_kv_heads
        extra = 4 if dtype == "int8" else 0
        item = {"float32": 4, "bfloat16": 2, "float16": 2}.get(dtype, 1)
        bytes_of = [-(-page_tokens * self.heads * (n + extra) * item // 4) * 4 for n in row]
        self.arena = self.memory.pages(400, sum(bytes_of))
        self.memory.pages_in(self.arena, range(400), np.full((400, sum(bytes_of)), 255, np.uint8))  # NaN
        shapes = [(page_tokens, self.heads, n + extra) for n in row]
        offsets = np.cumsum([0, *bytes_of])
        self.views = tuple(
            self.memory.page_view(self.arena, int(at), shape, dtype)
            for at, shape in zip(offsets[:-1], shapes, strict=True)
        )
        self.scales = (0.02, 0.03) if dtype == "fp8" else UNSCALED
        self.table = np.zeros((8, 600 // page_tokens + 2), np.int64)
        self.free = list(range(1, 400))

    def op(self, op: api.Op[Any]) -> Callable[..., Any]:
        if self.device == "cpu":
            made: Callable[..., Any] = KERNELS[op].make(self.case, self.pool)
            return made
        return self.backend.primitive(op, self.case)

    def put(self, x: Array) -> Any:
        return self.memory.put(np.ascontiguousarray(x), "float32", "float32")

    def step(self, slices: Slices, q: Array, parts: Sequence[Array], extra: Any) -> Array:
        """Write a step's rows and return its results. Pages are handed out as they are needed."""
        for row, start, count in zip(slices.rows, slices.starts, slices.lengths, strict=True):
            for index in range(start // self.size, (start + count - 1) // self.size + 1):
                self.table[row, index] = self.table[row, index] or self.free.pop()
        state = self.case.state()
        layout = build_layout(slices, self.table, self.size, state.lookback, self.memory, state.first_tokens)
        rows = tuple(self.put(x) for x in parts)
        self.op(api.WRITE_PAGES)(self.views, rows, layout.write_pages, layout.write_slots, self.scales)
        return self.attend(layout, q, extra)

    def attend(self, layout: PagedLayout, q: Array, extra: Any) -> Array:
        given = None if extra is None else self.put(extra)
        if isinstance(self.case, LatentAttention):
            kv: Any = PagedRows(self.views, layout, self.scales)
            found = self.op(api.PAGED_LATENT_ATTENTION)(self.put(q), kv, given)
        else:
            kv = PagedKeyValues(*self.views, layout, self.scales)
            found = self.op(api.PAGED_ATTENTION)(self.put(q), kv, given)
        return np.array(self.memory.get(found))


def numbers(case: Case, tokens: int, rng: np.random.Generator) -> tuple[Array, list[Array], Array | None]:
    """Return queries, the parts of the state, and sinks or the latents' matrix."""

    def draw(*shape: int) -> Array:
        return rng.standard_normal(shape, dtype=np.float32)

    if isinstance(case, LatentAttention):
        q = draw(tokens, case.num_heads, case.qk_nope_head_dim + case.qk_rope_head_dim)
        up = draw(case.num_heads, case.qk_nope_head_dim + case.v_head_dim, case.kv_lora_rank)
        return q, [draw(tokens, 1, case.row)], up
    q, k, v = (draw(tokens, n, case.head_dim) for n in (case.num_heads, case.num_kv_heads, case.num_kv_heads))
    return q, [k, v], draw(case.num_heads) if case.sinks else None


def tree_and_chains(
    device: str, case: Case, dtype: Any, page_tokens: int, known: Sequence[tuple[int, int]],
    trees: Sequence[Sequence[int]], seed: int, pool: int = 1, change: Callable[[Array], Array] = lambda x: x,
) -> tuple[Array, Array]:  # fmt: skip
    """Return the results of a step with trees, and those of each path alone, [T, H * D].

    known: for each sequence, its tokens before the step and its known tokens in the step. change: changes the paths.
    """
    rng = np.random.default_rng(seed)
    before, own = (np.array(x) for x in zip(*known, strict=True))
    sizes = np.array([len(tree) for tree in trees])
    totals = before + own + sizes
    q, parts, extra = numbers(case, int(totals.sum()), rng)
    offsets = np.cumsum(totals) - totals
    rig = Rig(device, case, dtype, page_tokens, pool)
    rows = rng.permutation(len(trees))
    early = np.flatnonzero(before)
    if early.size:
        chosen = np.concatenate([offsets[i] + np.arange(before[i]) for i in early])
        slices = Slices.plain(rows[early], np.zeros_like(early), before[early])
        rig.step(slices, q[chosen], [x[chosen] for x in parts], extra)
    chosen = np.concatenate([at + np.arange(b, t) for at, b, t in zip(offsets, before, totals, strict=True)])
    drafted = [bit for n, tree in zip(own, trees, strict=True) for bit in [0] * n + paths(tree)]
    bits = np.array(drafted, np.uint64).view(np.int64)
    none = np.zeros_like(rows)
    slices = Slices(rows, before, own + sizes, sizes, none, none, change(bits))
    found = rig.step(slices, q[chosen], [x[chosen] for x in parts], extra)

    wanted = []
    for i, tree in enumerate(trees):
        base, limit = offsets[i], before[i] + own[i]
        ends = [[*range(before[i], at + 1)] for at in range(before[i], limit)]
        path_bits = paths(tree)
        ends += [[*range(before[i], limit), *(limit + j for j in range(len(tree)) if b >> j & 1)] for b in path_bits]
        for path in ends:
            alone = Rig(device, case, dtype, page_tokens)
            tokens = base + np.array([*range(before[i]), *path])
            whole = Slices.plain(np.zeros(1, np.int64), np.zeros(1, np.int64), np.array([len(tokens)]))
            wanted.append(alone.step(whole, q[tokens], [x[tokens] for x in parts], extra)[-1])
    return found, np.array(wanted)


def check(device: str, found: Array, wanted: Array) -> None:
    assert np.isfinite(wanted).all()
    if device == "cpu":
        np.testing.assert_array_equal(found, wanted)
    else:
        np.testing.assert_allclose(found, wanted, rtol=0, atol=2e-5)


@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(
    name=st.sampled_from(COMPILED),
    dtype=st.sampled_from(DTYPES),
    page_tokens=st.sampled_from([1, 4, 16, 64]),
    known=st.lists(st.tuples(st.integers(0, 90), st.integers(0, 9)).filter(any), min_size=1, max_size=2),
    size=st.integers(1, 14),
    pool=st.sampled_from([1, 2, 4]),
    seed=st.integers(0, 2**16),
)
def test_each_draft_reads_its_path(
    name: str, dtype: Any, page_tokens: int, known: list[tuple[int, int]], size: int, pool: int, seed: int
) -> None:
    """Some sequences have drafts only, as the rows of a head, and others none, as answers beside those with drafts."""
    rng = np.random.default_rng(seed)
    trees = [random_tree(rng, int(rng.integers(0 if own else 1, size + 1))) for _, own in known]
    check("cpu", *tree_and_chains("cpu", CASES[name], dtype, page_tokens, known, trees, seed, pool))


@pytest.mark.parametrize("device", ["host", "reference"])
@pytest.mark.parametrize("name", CASES)
def test_other_backends(device: str, name: str) -> None:
    rng = np.random.default_rng(7)
    for dtype, page_tokens in (("int8", 16), ("fp8", 1)):
        trees = [random_tree(rng, 9), [-1, 0, -1, 0, 1, 2], [], [-1, -1, 1]]
        known = [(37, 3), (2, 1), (20, 1), (5, 0)]
        check(device, *tree_and_chains(device, CASES[name], dtype, page_tokens, known, trees, 3))


@pytest.mark.parametrize("known", [(0, 1), (63, 1), (500, 4)], ids=str)
def test_63_drafts(known: tuple[int, int]) -> None:
    """A tree over several tiles and two segments; a chain as a tree has the bits of the chain."""
    case = CASES["grouped"]
    for parents in (list(range(-1, 62)), [-1] * 63, random_tree(np.random.default_rng(2), 63)):
        check("cpu", *tree_and_chains("cpu", case, "float32", 16, [known], [parents], 1, 4))


def test_planted_bugs_are_seen() -> None:
    """A path with a wrong bit: an ancestor that is not read, or a draft that is no ancestor."""
    parents = [-1, -1, 0, 1, 2, 2]

    def run(device: str, change: Callable[[Array], Array]) -> tuple[Array, Array]:
        return tree_and_chains(device, CASES["grouped"], "float32", 4, [(10, 2)], [parents], 5, change=change)

    refused = 0
    for node in range(len(parents)):
        for bit in range(node):
            flip = (np.arange(2 + len(parents)) == 2 + node) * (1 << bit)
            found, wanted = run("host", lambda x, flip=flip: x ^ flip)  # type: ignore[misc]
            assert np.abs(found - wanted)[2 + node].max() > 1e-3
            try:
                found, wanted = run("cpu", lambda x, flip=flip: x ^ flip)  # type: ignore[misc]
                assert np.abs(found - wanted)[2 + node].max() > 1e-3
            except ValueError as e:
                assert "which is not itself and the path of an earlier draft" in str(e)
                refused += 1
    assert refused == 11  # the others are trees too
    with pytest.raises(ValueError, match="more than 63 drafts"):
        tree_and_chains("cpu", CASES["grouped"], "float32", 4, [(10, 2)], [[-1] * 64], 5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["grouped", "latents"])
def test_rows_move(name: str, dtype: Any) -> None:
    """Rows move within and between pages, with their scales, and nothing else changes."""
    case, arenas = CASES[name], []
    for device in ("cpu", "host", "reference"):
        rig = Rig(device, case, dtype, 4)
        q, parts, extra = numbers(case, 30, np.random.default_rng(1))
        zero = np.zeros(1, np.int64)
        rig.step(Slices.plain(zero, zero, np.array([30])), q, parts, extra)
        source, target = np.array([13, 14, 22, 29]), np.array([13, 12, 17, 18])
        at = [rig.memory.integers(x) for s in (source, target) for x in (rig.table[0, s // 4], s % 4)]
        rig.op(api.MOVE_ROWS)(rig.views, *at)
        order = np.arange(30)
        order[target] = source
        moved = Rig(device, case, dtype, 4)
        moved.step(Slices.plain(zero, zero, np.array([30])), q[order], [x[order] for x in parts], extra)
        whole, wanted = (np.asarray(r.arena) for r in (rig, moved))
        assert np.array_equal(whole, wanted)
        arenas.append(whole)
    assert np.array_equal(arenas[0], arenas[1])
    with pytest.raises(IndexError, match="page 400, slot 0 is not"):
        rig = Rig("cpu", case, dtype, 4)
        rig.op(api.MOVE_ROWS)(rig.views, *(np.array([x]) for x in (1, 0, 400, 0)))


def test_depths_are_positions() -> None:
    parents = [-1, 0, 0, 2, -1]
    none = np.zeros(2, np.int64)
    bits = np.array([0, 0, *paths(parents), 0], np.int64)
    slices = Slices(np.arange(2), np.array([5, 3]), np.array([7, 1]), np.array([5, 0]), none, none, bits)
    assert slices.positions().tolist() == [5, 6, *(7 + d for d in depths(parents)), 3]
    assert slices.slots().tolist() == [*range(5, 12), 3]


def results() -> Array:
    """Return results, which have the bits of the paths alone with every instruction set."""
    rng, outputs = np.random.default_rng(0), []
    for case in (CASES[name] for name in COMPILED):
        found, wanted = tree_and_chains("cpu", case, "float32", 4, [(70, 3)], [random_tree(rng, 9)], 1)
        check("cpu", found, wanted)
        outputs.append(found.ravel())
    return np.concatenate(outputs)
