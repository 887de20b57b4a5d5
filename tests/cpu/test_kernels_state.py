"""State of attention in every type: equal rounding on every backend, kernels within derived bounds, the same bits for
any layout of steps, and tests that find planted errors of a kernel.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.ops import api
from ridgeline.ops.api import DenseKeyValues, DenseRows, PagedKeyValues, PagedLayout, PagedRows
from ridgeline.ops.host import stored
from ridgeline.ops.host.memory import NumpyMemory
from ridgeline.ops.reference import stored as reference
from ridgeline.runtime.layout import Slices, build_layout
from ridgeline.spec import Attention, FirstTokens, LatentAttention, Layer, ModelSpec, RMSNorm, Strided
from ridgeline.spec.groups import state_groups
from ridgeline.spec.sight import CAUSAL
from ridgeline.spec.storage import STORAGES, UNSCALED, KVScales, StateDType, Storage

kernels = pytest.importorskip("ridgeline._kernels", reason="the kernels are not built: cmake -S . -B build")
from tests.oracle import attention_bounds as bounds  # noqa: E402

from cpu.instruction_sets import OTHERS, fingerprint_under  # noqa: E402
from ridgeline.ops.cpu import attention as ours  # noqa: E402
from ridgeline.ops.cpu import latent as our_latent  # noqa: E402

Array = np.ndarray[Any, Any]
NORM, MEMORY = RMSNorm(), NumpyMemory()
POOLS = {n: kernels.Pool(n) for n in (1, 2, 4)}
TYPES = pytest.mark.parametrize("storage", STORAGES.values(), ids=lambda s: s.dtype)
LATENT = LatentAttention(4, 32, 16, 8, 20, 0.2, NORM)
UGLY = [0.0, -0.0, 1e-45, -1e-40, 1e-36, 3e-8, 65504.0, 65520.0, 1e30, 3.3e38, -1.0, 1 / 3, 0.5, 2.5, 1 + 2**-8]


def rows_of(tokens: int, shape: tuple[int, ...], seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal((tokens, *shape), dtype=np.float32)


def unit_of(storage: Storage) -> StateDType | None:
    """Return the type if this process computes attention over it in a matrix unit, else None."""
    return storage.dtype if kernels.attends_in_unit(storage.dtype) else None


def near(storage: Storage) -> float:
    """Return how close kernels are to other backends: in a matrix unit queries and weights have 17 bits."""
    return 5e-5 if unit_of(storage) else 1e-5


# ---- equal rounding --------------------------------------------------------------------------------------------------


def ugly() -> Array:
    x = rows_of(64, (3, 21)) * np.float32(10.0) ** np.arange(-40, 24, dtype=np.float32)[:, None, None]
    x[:15, 0, :15] = np.tile(np.array(UGLY, np.float32), (15, 1)) * (1 - 2 * np.eye(15, dtype=np.float32))
    x[20, 1, 4], x[21, 1, 4], x[22] = np.inf, np.nan, 0.0
    return x


@TYPES
@pytest.mark.parametrize("page_tokens", [1, 3, 16])
def test_every_backend_rounds_to_the_same_bits(storage: Storage, page_tokens: int) -> None:
    x = ugly()
    wanted = stored.store_rows(storage)(x)
    theirs = reference.store_rows(storage)(torch.from_numpy(x))
    np.testing.assert_array_equal(reference.as_floats(theirs).numpy(), stored.as_floats(wanted))
    case, count = Attention(3, 3, 21, 1.0), 64 // page_tokens + 2
    page, slot = 1 + np.arange(64) // page_tokens, np.arange(64) % page_tokens
    for write in (ours.write_pages(case, POOLS[2]), host_write(case)):
        pages = pages_of(case, storage, page_tokens, count)
        write(pages, (x, x), page, slot)
        for numbers_last, part in enumerate((stored.keys_of(pages[0]), stored.values_of(pages[1]))):
            found = stored.read_rows(part, np.arange(1, count)[None], bool(numbers_last))[0, :64]
            np.testing.assert_array_equal(found, stored.as_floats(wanted))


def host_write(case: Attention) -> Any:
    from ridgeline.ops.host.attention import write_pages

    return write_pages(case)


@TYPES
def test_stored_numbers_are_close(storage: Storage) -> None:
    x = rows_of(300, (2, 64)) * np.exp(rows_of(300, (2, 1), 1) * 3)
    error = np.abs(stored.as_floats(stored.store_rows(storage)(x)) - x.astype(np.float64))
    limit = bounds.rounding(x, storage.dtype)
    assert (error <= limit).all()
    if not storage.is_exact:  # the bound is not much larger than needed
        assert (error > 0.97 * limit).any()


def test_a_head_that_is_not_finite_harms_no_other() -> None:
    x = ugly()
    whole = stored.as_floats(stored.store_rows(STORAGES["int8"])(x))
    broken = np.isnan(whole).all(-1)
    assert {tuple(at) for at in np.argwhere(broken)} == {(20, 1), (21, 1)}
    assert np.isfinite(whole[~broken]).all()


@pytest.mark.parametrize("size", [1, 63, 100, 257])
def test_float16_saturates(size: int) -> None:
    """Finite numbers never become infinite, so that no finite key or value turns an answer into NaN."""
    case, rng = Attention(1, 1, size, 1.0), np.random.default_rng(size)
    large = np.array([65504, 65519.99, 65520, 65536, 1e30, np.finfo(np.float32).max], np.float32)
    x = (rng.choice(large, (6, 1, size)) * rng.choice([-1, 1], (6, 1, size))).astype(np.float32)
    x[4:] = np.array([np.inf, np.nan], np.float32)[:, None, None]
    wanted = np.concatenate((np.copysign(np.float32(65504), x[:4]), x[4:]))
    for write in (ours.write_pages(case, POOLS[1]), host_write(case)):
        pages = pages_of(case, STORAGES["float16"], 3, 3)
        write(pages, (x, x), 1 + np.arange(6) // 3, np.arange(6) % 3)
        for numbers_last, part in enumerate((stored.keys_of(pages[0]), stored.values_of(pages[1]))):
            np.testing.assert_array_equal(stored.read_rows(part, np.array([[1, 2]]), bool(numbers_last))[0], wanted)
    theirs = reference.store_rows(STORAGES["float16"])(torch.from_numpy(x))
    np.testing.assert_array_equal(theirs.float().numpy(), wanted)
    kept = tuple(stored.store_rows(STORAGES["float16"])(part[:4]) for part in (x, x))
    assert np.isfinite(ours.attention(case, POOLS[1])(np.zeros_like(x[:4]), DenseKeyValues(*kept, (4,)), None)).all()


# ---- pages -----------------------------------------------------------------------------------------------------------


def pages_of(case: Any, storage: Storage, page_tokens: int, count: int) -> tuple[Array, ...]:
    """Return a layer's parts in an arena with other layers: all bytes are 255, which is NaN, or -1 times NaN."""
    if isinstance(case, Attention):  # rows are the same however far ahead a token sees
        case = replace(case, sight=CAUSAL)
    spec = ModelSpec("x", 1, 1, 1, (Layer(case, None, NORM),) * 3, NORM)
    (group,) = state_groups(spec, page_tokens=page_tokens, storage=storage)
    arena = MEMORY.pages(count, group.page_bytes)
    arena[:] = 255
    return tuple(MEMORY.page_view(arena, p.offset, (page_tokens, *p.shape), p.dtype) for p in group.slots[1].parts)


class Steps:
    """Computes sequences in random chunks and batches, with pages in any order."""

    def __init__(
        self, case: Any, storage: Storage, page_tokens: int, lengths: list[int], seed: int, pool: int,
        scales: KVScales = UNSCALED,
    ) -> None:  # fmt: skip
        self.scales = scales
        self.case, self.page_tokens, self.lengths, self.rng = case, page_tokens, lengths, np.random.default_rng(seed)
        needed = [-(-n // page_tokens) for n in lengths]
        self.pages = pages_of(case, storage, page_tokens, sum(needed) + 1)
        free = self.rng.permutation(np.arange(1, sum(needed) + 1)).tolist()
        self.tables = np.zeros((len(lengths), max(needed) + 2), np.int64)
        for row, n in enumerate(needed):
            self.tables[row, :n] = [free.pop() for _ in range(n)]
        self.pool, self.layouts = POOLS[pool], []

    def run(self, parts: tuple[Array, ...], attend: Any, out: Array, longest: int = 60) -> Array:
        """Fill `out` with results. attend(tokens, layout) returns the results of those tokens."""
        offsets = np.cumsum(self.lengths) - self.lengths
        done, write = np.zeros(len(self.lengths), np.int64), ours.write_pages(self.case, self.pool)
        while (done < self.lengths).any():
            chosen = np.flatnonzero((done < self.lengths) & (self.rng.random(len(done)) < 0.7))
            if not len(chosen):
                continue
            count = self.rng.integers(1, longest)
            if isinstance(self.case, Attention):  # whole blocks, whose tokens see each other
                count = -(-count // self.case.sight.block) * self.case.sight.block
            counts = np.minimum(np.array(self.lengths)[chosen] - done[chosen], count)
            layout = self.layout(chosen, done[chosen], counts)
            spans = zip(chosen, counts, strict=True)
            tokens = np.concatenate([offsets[i] + done[i] + np.arange(c) for i, c in spans])
            write(self.pages, tuple(x[tokens] for x in parts), layout.write_pages, layout.write_slots, self.scales)
            out[tokens] = attend(tokens, layout)
            done[chosen] += counts
        return out

    def layout(self, rows: Array, starts: Array, counts: Array, memory: Any = MEMORY) -> PagedLayout:
        state = self.case.state()
        slices = Slices.plain(rows, starts, counts)
        return build_layout(slices, self.tables, self.page_tokens, state.lookback, memory, state.first_tokens)


def draw(case: Attention, tokens: int, seed: int) -> tuple[Array, Array, Array, Array | None]:
    q, k, v = (rows_of(tokens, (h, case.head_dim), seed + h) for h in (case.num_heads, *[case.num_kv_heads] * 2))
    return q, k * 2, np.roll(v, 1), rows_of(case.num_heads, (), seed) if case.sinks else None


def dense(case: Attention, storage: Storage, given: tuple[Any, ...], lengths: list[int], pool: int = 1) -> Array:
    q, k, v, sinks = given
    k, v = (stored.store_rows(storage)(x) for x in (k, v))
    return ours.attention(case, POOLS[pool])(q, DenseKeyValues(k, v, tuple(lengths)), sinks)


HEADS = [(1, 1), (4, 4), (6, 2), (9, 3), (8, 1)]
LOOKS: list[dict[str, Any]] = [
    {}, {"window": 24, "sinks": True}, {"window": 7, "pattern": FirstTokens(30)},
    {"window": 30, "pattern": Strided(17), "softcap": 3.0},
]  # fmt: skip
SERVED = {
    "dim": st.sampled_from([3, 16, 40, 64]), "page_tokens": st.sampled_from([1, 3, 4, 16, 64]),
    "lengths": st.lists(st.integers(1, 200), min_size=1, max_size=5), "pool": st.sampled_from([1, 2, 4]),
    "seed": st.integers(0, 2**16),
}  # fmt: skip


def check_steps(case: Attention, storage: Storage, page_tokens: int, lengths: list[int], pool: int, seed: int) -> None:
    """Check that chunks, pages, batches and threads change no bit of attention over whole sequences."""
    q, k, v, sinks = draw(case, sum(lengths), seed)
    steps = Steps(case, storage, page_tokens, lengths, seed, pool)
    attend = ours.paged_attention(case, POOLS[pool])
    out = np.full((len(q), case.num_heads * case.head_dim), np.nan, np.float32)

    def run(tokens: Any, layout: Any) -> Any:
        return attend(q[tokens], PagedKeyValues(*steps.pages, layout), sinks)

    np.testing.assert_array_equal(steps.run((k, v), run, out), dense(case, storage, (q, k, v, sinks), lengths))


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(
    heads=st.sampled_from(HEADS), look=st.sampled_from(LOOKS),
    dtype=st.sampled_from(["bfloat16", "float16", "int8", "fp8"]), **SERVED,
)  # fmt: skip
def test_chunks_pages_batches_and_threads_change_no_bit(
    heads: tuple[int, int], dim: int, look: dict[str, Any], dtype: str, page_tokens: int, lengths: list[int], pool: int,
    seed: int,
) -> None:  # fmt: skip
    check_steps(Attention(*heads, dim, 0.3, **look), STORAGES[dtype], page_tokens, lengths, pool, seed)


@TYPES
@pytest.mark.parametrize("page_tokens", [1, 16])
def test_latents_too(storage: Storage, page_tokens: int) -> None:
    lengths = [150, 3, 70]
    q, rows = rows_of(223, (4, 24)), rows_of(223, (1, 40), 1)
    up = rows_of(4, (36, 32), 2) / 6
    steps = Steps(LATENT, storage, page_tokens, lengths, 0, 2)
    attend = our_latent.paged_latent_attention(LATENT, POOLS[2])
    out = np.full((223, 80), np.nan, np.float32)
    steps.run((rows,), lambda tokens, layout: attend(q[tokens], PagedRows(steps.pages, layout), up), out)
    kept = stored.store_rows(storage)(rows)
    whole = our_latent.latent_attention(LATENT, POOLS[1])(q, DenseRows((kept,), tuple(lengths)), up)
    np.testing.assert_array_equal(out, whole)
    wide = our_latent.latent_attention(LATENT, POOLS[1])(q, DenseRows((stored.as_floats(kept),), tuple(lengths)), up)
    np.testing.assert_allclose(out, wide, rtol=0, atol=near(storage))


@TYPES
def test_backends_agree(storage: Storage) -> None:
    """Compare numpy's and torch's kernels over the same pages, each with its own layout."""
    from ridgeline.ops import open_table
    from ridgeline.ops.host.backend import NumpyBackend

    case, lengths = Attention(6, 2, 16, 0.3, window=50, sinks=True), [90, 20]
    given = draw(case, 110, 1)
    wanted = dense(case, storage, given, lengths)
    steps = Steps(case, storage, 16, lengths, 0, 1)
    attend = NumpyBackend().primitive(api.PAGED_ATTENTION, case)
    out = np.full_like(wanted, np.nan)
    steps.run(given[1:3], lambda t, lay: attend(given[0][t], PagedKeyValues(*steps.pages, lay), given[3]), out)
    np.testing.assert_allclose(out, wanted, rtol=0, atol=near(storage))
    table = open_table("reference", {"attention": "reference"})
    tensors = [torch.from_numpy(x) for x in given]  # type: ignore[arg-type]
    store = table.primitive(api.STORE_ROWS, storage)
    kv = DenseKeyValues(store(tensors[1]), store(tensors[2]), tuple(lengths))
    found = table.primitive(api.ATTENTION, case)(tensors[0], kv, tensors[3])
    np.testing.assert_allclose(table.memory.get(found), wanted, rtol=0, atol=near(storage))


# ---- bounds ----------------------------------------------------------------------------------------------------------

CASES = [Attention(4, 4, 64, 0.125), Attention(9, 3, 64, 0.125), Attention(8, 1, 80, 0.1, window=100, sinks=True),
         Attention(4, 2, 13, 0.4, softcap=2.0)]  # fmt: skip


@TYPES
@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.num_heads}/{c.num_kv_heads}x{c.head_dim}")
@pytest.mark.parametrize("tokens", [1, 100, pytest.param(700, marks=pytest.mark.nightly)])
def test_within_the_bounds(case: Attention, tokens: int, storage: Storage) -> None:
    given = draw(case, tokens, 5)
    found = dense(case, storage, given, [tokens], 2).reshape(tokens, case.num_heads, -1)
    q, k, v, sinks = given
    kept = [stored.as_floats(stored.store_rows(storage)(x)) for x in (k, v)]
    scaled = storage.dtype in ("int8", "fp8")
    rounded = bounds.attend(case, q, *kept, sinks, scaled=scaled, unit=unit_of(storage))
    assert (np.abs(found - rounded.out) <= rounded.bound).all()
    # smaller queries, because a bound of first order needs small changes
    exact = bounds.attend(case, q / 8, k, v, sinks)
    moved = bounds.attend(case, q / 8, *kept, sinks)
    assert (np.abs(moved.out - exact.out) <= bounds.price(case, q / 8, k, v, exact, storage.dtype) + 1e-12).all()


# ---- planted bugs must break the bounds -----------------------------------------------------------------------------


class Bugs:
    """Plant the errors of a wrong kernel in the inputs of a right one."""

    @staticmethod
    def wrong_page(steps: Steps, layout: PagedLayout) -> None:
        tables: Any = layout.tables
        tables[0, 1] = steps.tables[1, 0]  # its own pages in another order would give the same result

    @staticmethod
    def slot_off_by_one(steps: Steps, layout: PagedLayout) -> None:
        keys = stored.keys_of(steps.pages[0]).numbers
        page = np.asarray(layout.tables)[0, 1]
        keys[page] = np.roll(keys[page], 1, -1)

    @staticmethod
    def scale_of_the_wrong_head(steps: Steps, layout: PagedLayout) -> None:
        scales = stored.keys_of(steps.pages[0]).scales
        assert scales is not None
        page = np.asarray(layout.tables)[0, 1]
        scales[page] = scales[page][::-1].copy()

    @staticmethod
    def stale_page(steps: Steps, layout: PagedLayout) -> None:
        pages = np.asarray(layout.tables)[0]
        for part in steps.pages:
            part[pages[3]] = part[pages[2]]

    @staticmethod
    def one_stale_slot(steps: Steps, layout: PagedLayout) -> None:
        values = stored.values_of(steps.pages[1]).numbers
        page = np.asarray(layout.tables)[0, 2]
        values[page, :, 5] = values[page, :, 4]


@pytest.mark.parametrize("tokens", [100, pytest.param(2000, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("bug", [name for name in vars(Bugs) if not name.startswith("_")])
@pytest.mark.parametrize("dtype", ["float32", "int8", "fp8"])
def test_a_planted_bug_breaks_the_bound(bug: str, dtype: str, tokens: int) -> None:
    """One wrong page, slot or head among up to 125 pages breaks the bound by far, and without
    the bug the bound holds.
    """
    if bug == "scale_of_the_wrong_head" and dtype != "int8":
        pytest.skip("heads have no scales of their own")
    case, storage = Attention(4, 2, 64, 0.125), STORAGES[dtype]
    q, k, v, _ = draw(case, tokens + 16, 0)
    steps = Steps(case, storage, 16, [tokens, 16], 0, 2)
    one = np.zeros(1, np.int64)
    before = steps.layout(np.arange(2), np.zeros(2, np.int64), np.array([tokens, 16]))
    ours.write_pages(case, POOLS[2])(steps.pages, (k, v), before.write_pages, before.write_slots)
    layout = steps.layout(one, one + tokens - 1, one + 1)
    kept = [stored.as_floats(stored.store_rows(storage)(x[:tokens])) for x in (k, v)]
    exact = bounds.attend(case, q[-1:].repeat(tokens, 0), *kept, None, scaled=dtype in ("int8", "fp8"))
    attend = ours.paged_attention(case, POOLS[2])

    def excess() -> float:
        found = attend(q[-1:], PagedKeyValues(*steps.pages, layout)).reshape(case.num_heads, -1)
        return float((np.abs(found - exact.out[-1]) / exact.bound[-1]).max())

    assert excess() <= 1
    getattr(Bugs, bug)(steps, layout)
    assert excess() > 4


# ---- instruction sets ------------------------------------------------------------------------------------------------


def fingerprint() -> bytes:
    """Return results that must not depend on the instruction set, beginning with `written`."""
    outputs = [dense(case, storage, draw(case, 150, 1), [110, 40]) for storage in STORAGES.values() for case in CASES]
    return np.concatenate([written(), *(x.ravel() for x in outputs)]).tobytes()


def written() -> Array:
    """Return numbers that were written to pages in every type, in float32: common ones, and those of `ugly`."""
    case, found = Attention(3, 3, 21, 1.0), []
    x = np.concatenate((rows_of(96, (3, 21)), ugly()))
    for storage in STORAGES.values():
        pages = pages_of(case, storage, 16, 11)
        ours.write_pages(case, POOLS[1])(pages, (x, x), 1 + np.arange(160) // 16, np.arange(160) % 16)
        for numbers_last, part in enumerate((stored.keys_of(pages[0]), stored.values_of(pages[1]))):
            found.append(stored.read_rows(part, np.arange(1, 11)[None], bool(numbers_last)).ravel())
    return np.concatenate(found)


@pytest.mark.parametrize("isa", OTHERS)
def test_instruction_sets(isa: str) -> None:
    theirs, mine = (np.frombuffer(x, np.float32) for x in (fingerprint_under(isa, "test_kernels_state"), fingerprint()))
    kept = written().size
    np.testing.assert_array_equal(theirs[:kept], mine[:kept])
    if isa == "portable":  # the portable set may round products before they are added
        np.testing.assert_allclose(theirs, mine, rtol=0, atol=1e-5)
    else:
        np.testing.assert_array_equal(theirs, mine)
