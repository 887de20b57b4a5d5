"""The first and the last ops of a step by kernels: rows of tables, rotations, slots in pages, the best token."""

from __future__ import annotations

import numpy as np
import pytest

kernels = pytest.importorskip("ridgeline._kernels", reason="the kernels of csrc/ are not built")

from ridgeline.ops import api, open_table  # noqa: E402
from ridgeline.ops.cpu.backend import CpuBackend  # noqa: E402
from ridgeline.ops.cpu.tokens import rows_from, with_heads  # noqa: E402
from ridgeline.ops.host.memory import dtype_of, widen  # noqa: E402

SIZES = [1, 63, 100, 257]
BACKENDS = [CpuBackend(kernels.Pool(threads)) for threads in (1, 2, 4)]
threads = pytest.mark.parametrize("backend", BACKENDS, ids=["1 thread", "2 threads", "4 threads"])


@threads
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("width", SIZES)
def test_embedding(backend: CpuBackend, dtype: str, width: int) -> None:
    rng = np.random.default_rng(width)
    whole = rng.normal(size=(50, width + 3)).astype(dtype_of(dtype))
    table, ids = whole[:, 1 : width + 1], rng.integers(0, 50, 33)  # rows that may begin at any address
    found = backend.primitive(api.EMBEDDING, None)(table, ids)
    assert np.array_equal(found, widen(np.ascontiguousarray(table))[ids])


def test_tables_of_files_begin_anywhere() -> None:
    data = np.zeros(1 + 40 * 6 * 2, np.uint8)
    table = data[1:].view(dtype_of("bfloat16")).reshape(40, 6)
    table[:] = np.arange(240).reshape(40, 6)
    found = BACKENDS[1].primitive(api.EMBEDDING, None)(table, np.array([39, 0]))
    assert np.array_equal(found, table[[39, 0]].astype(np.float32))


@pytest.mark.parametrize("wrong", [-1, 50])
def test_a_token_that_is_not_there(wrong: int) -> None:
    with pytest.raises(IndexError, match=f"token {wrong} of 50"):
        BACKENDS[0].primitive(api.EMBEDDING, None)(np.zeros((50, 4), np.float32), np.array([3, wrong]))


@threads
@pytest.mark.parametrize("size", SIZES)
def test_rows_are_taken_from_two_arrays(backend: CpuBackend, size: int) -> None:
    rng, pool = np.random.default_rng(size), backend._pool
    a, b = (rng.normal(size=(n, size, 6)).astype(np.float32) for n in (7, 12))
    rows = rng.integers(0, 19, (size, 3))
    for parts in ((a, b), (a[..., 2:5], b[..., 1:4]), (a[:, :, 0], b[:, :, 1]), (a[:, 0], b[:, 0])):
        found = np.full((rows.size, parts[0][0].size), np.nan, np.float32)
        kernels.take_rows(pool, *(with_heads(x) for x in parts), rows.ravel(), found)
        wanted = np.concatenate(parts)[rows]
        assert np.array_equal(found.reshape(wanted.shape), wanted)
        assert np.array_equal(rows_from(pool, parts, rows), wanted)
        assert np.array_equal(backend.primitive(api.TAKE, None)(parts[1], rows % 12), parts[1][rows % 12])


@pytest.mark.parametrize("wrong", [-1, 5])
def test_a_row_that_is_not_there(wrong: int) -> None:
    with pytest.raises(IndexError, match=f"row {wrong} of 5"):
        rows_from(BACKENDS[0]._pool, [np.zeros((n, 4), np.float32) for n in (2, 3)], np.array([4, wrong]))


@threads
@pytest.mark.parametrize("size", SIZES)
def test_rotary_is_float64_rounded_once(backend: CpuBackend, size: int) -> None:
    rng = np.random.default_rng(size)
    positions = rng.integers(0, 131072, size)
    frequencies = (10000.0 ** -np.linspace(0, 1, 37)).astype(np.float32)
    cos, sin = backend.primitive(api.ROTARY, None)(positions, frequencies, 1.5)
    angles = (positions[:, None].astype(np.float32) * frequencies).astype(np.float64)
    for found, wanted in ((cos, np.cos(angles)), (sin, np.sin(angles))):
        assert np.array_equal(found, wanted.astype(np.float32) * np.float32(1.5))
    own = np.stack([frequencies * np.float32(1 + t % 3) for t in range(size)])  # frequencies for each token
    together = backend.primitive(api.ROTARY, None)(positions, own, 1.5)
    for t in range(0, size, 7):
        alone = backend.primitive(api.ROTARY, None)(positions[t : t + 1], own[t], 1.5)
        assert all(np.array_equal(all_of[t], one[0]) for all_of, one in zip(together, alone, strict=True))


@pytest.mark.parametrize("page_tokens", [1, 16, 64])
@pytest.mark.parametrize("last", [[0, 1, 2, 3], [1, 3], [3]])
def test_the_layout_of_a_decode_step(page_tokens: int, last: list[int]) -> None:
    rng = np.random.default_rng(page_tokens)
    page_table, rows = rng.integers(1, 999, (9, 12)), np.array([8, 0, 3, 3])
    positions = rng.integers(0, 12 * page_tokens, 4)
    for table in (open_table("cpu"), open_table("reference")):
        integers = table.memory.integers
        pages, slots, tables = table.primitive(api.DECODE_LAYOUT)(
            integers(page_table), integers(rows), integers(positions), integers(np.array(last)), page_tokens
        )
        index = positions // page_tokens
        assert np.array_equal(pages, page_table[rows, index])
        assert np.array_equal(slots, positions % page_tokens)
        for found, row, page in zip(np.asarray(tables), rows[last], index[last], strict=True):
            assert np.array_equal(found[: page + 1], page_table[row, : page + 1])


@pytest.mark.parametrize(("row", "position", "last"), [(9, 0, 0), (-1, 0, 0), (0, 12, 0), (0, 0, 1)])
def test_slots_that_do_not_exist(row: int, position: int, last: int) -> None:
    with pytest.raises(IndexError):
        BACKENDS[0].primitive(api.DECODE_LAYOUT, None)(
            np.zeros((9, 12), np.int64), np.array([row]), np.array([position]), np.array([last]), 1
        )


@threads
@pytest.mark.parametrize("size", [*SIZES, 2048, 2049, 5000])
def test_best_is_the_first_of_equals(backend: CpuBackend, size: int) -> None:
    rng = np.random.default_rng(size)
    logits = rng.normal(size=(17, size + 5)).astype(np.float32)[:, 2 : size + 2]
    logits[1] = rng.integers(0, 3, size)
    logits[2] = -0.0
    logits[2, size // 2] = 0.0
    logits[3] = -np.inf
    logits[4, size - 1] = np.inf
    logits[5, size // 3 :] = np.nan
    logits[6, [0, size - 1]] = np.nan
    ids, values = backend.primitive(api.BEST, None)(logits)
    assert np.array_equal(ids, logits.argmax(axis=1))
    assert np.array_equal(values, logits[np.arange(17), ids], equal_nan=True)


def test_the_reference_has_the_first_of_equals_too() -> None:
    table = open_table("reference")
    logits = np.array([[1, 3, 3, 0], [np.nan, 5, np.nan, 1]], np.float32)
    ids, values = table.primitive(api.BEST)(table.memory.put(logits, "float32", "float32"))
    assert ids.tolist() == [1, 0]
    assert values[0] == 3
