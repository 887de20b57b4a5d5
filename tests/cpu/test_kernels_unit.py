"""Attention in a matrix unit, and attention that is rounded to bf16: within its bound, and the same bits in any
company. The tests hold for vectors too, and run again in a process with an emulated unit.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ridgeline.ops.api import DenseKeyValues, PagedKeyValues
from ridgeline.ops.host import stored
from ridgeline.spec import Attention, Blocks, Dilated, FirstTokens, Strided
from ridgeline.spec.storage import STORAGES, StateDType

kernels = pytest.importorskip("ridgeline._kernels", reason="the kernels are not built: cmake -S . -B build")
from tests.oracle import attention_bounds as bounds  # noqa: E402

from cpu.test_kernels_state import POOLS, Array, Steps, dense, draw, unit_of  # noqa: E402
from ridgeline.ops.cpu import attention as ours  # noqa: E402

SIZES = (1, 63, 100, 257)
TYPES: tuple[StateDType, ...] = ("bfloat16", "float16")
by_type = pytest.mark.parametrize("dtype", TYPES)
CASES = {
    "one head, a small size": Attention(1, 1, 8, 0.4),
    "groups": Attention(9, 3, 64, 0.125),
    "a size between": Attention(4, 2, 70, 0.1, sinks=True),
    "more rows than a square": Attention(35, 1, 33, 0.2, softcap=2.0),
    "window": Attention(4, 2, 48, 0.2, window=70),
    "first tokens": Attention(2, 2, 24, 0.2, window=40, pattern=FirstTokens(30)),
    "dilated": Attention(4, 2, 16, 0.3, window=20, pattern=Dilated(5)),
    "strided": Attention(4, 2, 16, 0.3, window=30, pattern=Strided(17), sinks=True, softcap=5.0),
    "blocks": Attention(9, 3, 64, 0.125, sight=Blocks(24)),
}
by_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


@pytest.fixture(params=[False, True], ids=["exact", "rounded"])
def rounds(request: pytest.FixtureRequest) -> Iterator[bool]:
    """Return whether the pools round attention."""
    if request.param and (refusal := kernels.rounded_refusal()):
        pytest.skip(refusal)
    for pool in POOLS.values():
        pool.rounds_attention = request.param
    yield request.param
    for pool in POOLS.values():
        pool.rounds_attention = False


@by_type
@by_case
def test_within_the_bound(case: Attention, dtype: StateDType, rounds: bool) -> None:
    """Prompts in random chunks, batches and pages that are full of NaN before: each is close to float64."""
    storage, given = STORAGES[dtype], draw(case, sum(SIZES), 3)
    steps = Steps(case, storage, 16, list(SIZES), 4, 2)
    attend, out = ours.paged_attention(case, POOLS[2]), np.full((len(given[0]), case.num_heads, case.head_dim), np.nan)
    steps.run(
        given[1:3],
        lambda t, lay: attend(given[0][t], PagedKeyValues(*steps.pages, lay), given[3]).reshape(-1, *out.shape[1:]),
        out, 200,
    )  # fmt: skip
    kept = [stored.as_floats(stored.store_rows(storage)(x)) for x in given[1:3]]
    for first, n in zip(np.cumsum(SIZES) - SIZES, SIZES, strict=True):
        rows = slice(first, first + n)
        exact = bounds.attend(
            case, given[0][rows], *(x[rows] for x in kept), given[3], unit=unit_of(storage), rounds=rounds
        )
        assert (np.abs(out[rows] - exact.out) <= exact.bound).all()


@by_type
@by_case
@pytest.mark.usefixtures("rounds")
def test_one_token_at_a_time_has_the_bits_of_the_prompt(case: Attention, dtype: StateDType) -> None:
    """Each token alone, as in decode, in pages of any size, with any number of threads."""
    storage, n = STORAGES[dtype], 75
    given = draw(case, n, 5)
    whole = dense(case, storage, given, [n])
    for page_tokens, pool, longest in ((16, 1, 2), (4, 2, 30), (64, 4, 30)):
        steps = Steps(case, storage, page_tokens, [n], 1, pool)
        attend, out = ours.paged_attention(case, POOLS[pool]), np.full_like(whole, np.nan)
        steps.run(
            given[1:3],
            lambda t, lay, a=attend, s=steps: a(given[0][t], PagedKeyValues(*s.pages, lay), given[3]),
            out, longest,
        )  # fmt: skip
        np.testing.assert_array_equal(out, whole)


@by_type
def test_a_long_context_is_divided_between_threads(dtype: StateDType, rounds: bool) -> None:
    case, storage = Attention(1, 1, 8, 0.3), STORAGES[dtype]
    q, k, v, _ = draw(case, 1100, 2)
    found = [dense(case, storage, (q, k, v, None), [1100], pool) for pool in (1, 4)]
    assert all(np.array_equal(x, found[0]) for x in found)
    kept = [stored.as_floats(stored.store_rows(storage)(x)) for x in (k, v)]
    exact = bounds.attend(case, q, *kept, None, unit=unit_of(storage), rounds=rounds)
    assert (np.abs(found[0].reshape(exact.out.shape) - exact.out) <= exact.bound).all()


@by_type
@pytest.mark.parametrize("at", [40, 64])
@pytest.mark.usefixtures("rounds")
def test_a_bad_token_harms_no_earlier_one(at: int, dtype: StateDType) -> None:
    """A weight of 0 times an infinity or a NaN is NaN, and must not reach the sum of a query before it."""
    case, lengths, storage = Attention(2, 1, 20, 0.3), [30, 60, 5], STORAGES[dtype]
    q, k, v, _ = draw(case, 95, 3)
    clean = dense(case, storage, (q, k, v, None), lengths)
    for bad in (-np.inf, np.uint32(0xFFFFFFFF).view(np.float32)):
        for x in (q, k, v):
            held = x[at].copy()
            x[at] = bad
            dirty = dense(case, storage, (q, k, v, None), lengths)
            x[at] = held
            unharmed = np.r_[:at, 90:95]
            np.testing.assert_array_equal(dirty[unharmed], clean[unharmed])
            if x is q or np.isnan(bad):
                assert np.isnan(dirty[at]).all()
            else:
                assert not np.isfinite(dirty[at]).all()


@by_type
def test_a_lost_slice_breaks_the_bound(dtype: StateDType) -> None:
    """The bound of the unit sees a kernel that drops a second slice of queries, weights, keys or values."""
    case, n = Attention(4, 2, 64, 0.125), 100
    given = draw(case, n, 0)
    kept = [stored.as_floats(stored.store_rows(STORAGES[dtype])(x)) for x in given[1:3]]
    exact = bounds.attend(case, given[0], *kept, None, unit=dtype)
    first = STORAGES["bfloat16"]

    def excess(out: Array) -> float:
        return float((np.abs(out - exact.out) / exact.bound).max())

    def lost(x: Array) -> Array:
        return np.asarray(stored.as_floats(stored.store_rows(first)(x)))

    assert excess(bounds.attend(case, lost(given[0]), *kept, None).out) > 4
    weights, values = lost(exact.weights.astype(np.float32)), np.repeat(kept[1], 2, 1).transpose(1, 0, 2)
    assert excess((weights @ values).transpose(1, 0, 2)) > 4
    if dtype == "float16":
        assert excess(bounds.attend(case, given[0], lost(kept[0]), kept[1], None).out) > 4
        assert excess(bounds.attend(case, given[0], kept[0], lost(kept[1]), None).out) > 4


@by_type
def test_planted_bugs_break_the_bound(dtype: StateDType) -> None:
    """A mask that is off by one, and a value that belongs to the key before."""
    case, n = Attention(4, 2, 64, 0.125), 150
    q, k, v, _ = draw(case, n, 0)
    storage = STORAGES[dtype]
    kept = [stored.as_floats(stored.store_rows(storage)(x)) for x in (k, v)]
    exact = bounds.attend(case, q, *kept, None, unit=unit_of(storage))

    def excess(q: Array, k: Any, v: Any) -> float:
        parts = (stored.store_rows(storage)(x) for x in (k, v))
        found = ours.attention(case, POOLS[1])(q, DenseKeyValues(*parts, (len(q),)), None).reshape(-1, 4, 64)
        return float((np.abs(found - exact.out[-len(found) :]) / exact.bound[-len(found) :]).max())

    assert excess(q, k, v) <= 1
    stale = v.copy()
    stale[100] = v[99]
    assert excess(q, k, stale) > 4
    assert excess(q[1:], k[1:], v[1:]) > 4  # without the first key


def run(name: str, unit: str) -> subprocess.CompletedProcess[str]:
    here = Path(__file__).parent
    env = {**os.environ, "RIDGELINE_MATRIX_UNIT": unit, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    command = [sys.executable, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", "-k", "not in_a_process"]
    return subprocess.run([*command, str(here / name)], env=env, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_in_a_process_with_a_matrix_unit() -> None:
    found = run("test_kernels_unit.py", "emulated")
    assert found.returncode == 0, found.stdout[-3000:]


@pytest.mark.nightly
@pytest.mark.parametrize("unit", ["emulated", "amx"])
@pytest.mark.parametrize("name", ["kernels_unit", "kernels_state", "kernels_attention", "tree_attention"])
def test_in_a_process_with_each_unit(name: str, unit: str) -> None:
    found = run(f"test_{name}.py", unit)
    if "RIDGELINE_MATRIX_UNIT=amx: " in found.stdout + found.stderr:
        pytest.skip("no AMX here")
    assert found.returncode == 0, found.stdout[-3000:]
