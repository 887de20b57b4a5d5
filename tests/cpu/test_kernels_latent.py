"""Latent attention by kernels: close to float64, and the same bits for any layout of steps."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.ops.api import DenseRows, PagedRows
from ridgeline.ops.reference import latent as reference
from ridgeline.ops.reference.backend import TorchMemory
from ridgeline.runtime.layout import Slices, build_layout
from ridgeline.spec import ALL, LatentAttention, RMSNorm

kernels = pytest.importorskip("ridgeline._kernels", reason="the kernels of csrc/ are not built")
from ridgeline.ops.cpu import latent as ours  # noqa: E402
from ridgeline.ops.cpu.attention import write_pages  # noqa: E402

Array = np.ndarray[Any, Any]
NAN, NORM = float("nan"), RMSNorm()
POOLS = {n: kernels.Pool(n) for n in (1, 2, 4)}
SMALL = LatentAttention(3, 12, 5, 4, 7, 0.3, NORM)
CASES = [
    SMALL, LatentAttention(4, 32, 16, 8, 20, 0.2, NORM), LatentAttention(1, 3, 8, 2, 9, 0.5, NORM),
    LatentAttention(66, 16, 8, 4, 8, 0.3, NORM), LatentAttention(16, 512, 128, 64, 128, 0.07, NORM),
]  # fmt: skip


def draw(case: LatentAttention, tokens: int, seed: int = 0) -> tuple[Array, Array, Array]:
    rng = np.random.default_rng(seed)
    q = rng.standard_normal((tokens, case.num_heads, case.qk_head_dim), dtype=np.float32)
    rows = rng.standard_normal((tokens, 1, case.row), dtype=np.float32)
    kv_b = rng.standard_normal((case.num_heads, case.qk_nope_head_dim + case.v_head_dim, case.kv_lora_rank))
    return q, rows, (kv_b / case.kv_lora_rank**0.5).astype(np.float32)


def dense(case: LatentAttention, q: Array, rows: Array, kv_b: Array, lengths: list[int], pool: int = 1) -> Array:
    return ours.latent_attention(case, POOLS[pool])(q, DenseRows((rows,), tuple(lengths)), kv_b)


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.num_heads}x{c.row}")
def test_against_the_definition(case: LatentAttention) -> None:
    lengths = [1, 63, 100, 257] if case.num_heads < 64 else [1, 70]
    q, rows, kv_b = draw(case, sum(lengths))
    found = dense(case, q, rows, kv_b, lengths, 2)
    doubles = [torch.from_numpy(x).double() for x in (q, rows, kv_b)]
    wanted = reference.latent_attention(case)(doubles[0], DenseRows((doubles[1],), tuple(lengths)), doubles[2])
    np.testing.assert_allclose(found, wanted.numpy(), rtol=0, atol=2e-5)


def test_weights_in_bfloat16() -> None:
    case = CASES[1]
    q, rows, kv_b = draw(case, 50)
    half = kv_b.astype(ml_dtypes.bfloat16)
    found, wanted = dense(case, q, rows, half, [50]), dense(case, q, rows, half.astype(np.float32), [50])
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-6)


@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(
    case=st.sampled_from(CASES[:4]),
    page_tokens=st.sampled_from([1, 3, 16, 64]),
    lengths=st.lists(st.integers(1, 150), min_size=1, max_size=4),
    pool=st.sampled_from([1, 2, 4]),
    seed=st.integers(0, 2**16),
)
def test_chunks_pages_batches_and_threads_change_no_bit(
    case: LatentAttention, page_tokens: int, lengths: list[int], pool: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    q, rows, kv_b = draw(case, sum(lengths), seed)
    attend = ours.paged_latent_attention(case, POOLS[pool])
    write = write_pages(case, POOLS[pool])
    pages = np.full((1000, page_tokens, 1, case.row), NAN, np.float32)
    free, tables = rng.permutation(np.arange(1, 1000)).tolist(), np.zeros((len(lengths), 150), np.int64)
    offsets, done = np.cumsum(lengths) - lengths, np.zeros(len(lengths), np.int64)
    out = np.full((len(q), case.num_heads * case.v_head_dim), NAN, np.float32)
    while (done < lengths).any():
        chosen = np.array([i for i, n in enumerate(lengths) if done[i] < n and rng.random() < 0.7], np.int64)
        if not len(chosen):
            continue
        counts = np.minimum(np.array(lengths)[chosen] - done[chosen], rng.integers(1, 60, len(chosen)))
        for i, count in zip(chosen, counts, strict=True):
            for index in range(done[i] // page_tokens, (done[i] + count - 1) // page_tokens + 1):
                tables[i, index] = tables[i, index] or free.pop()
        layout = build_layout(Slices.plain(chosen, done[chosen], counts), tables, page_tokens, ALL, TorchMemory("cpu"))
        tokens = np.concatenate([offsets[i] + done[i] + np.arange(c) for i, c in zip(chosen, counts, strict=True)])
        write((pages,), (rows[tokens],), np.asarray(layout.write_pages), np.asarray(layout.write_slots))
        out[tokens] = attend(q[tokens], PagedRows((pages,), layout), kv_b)
        done[chosen] += counts
    assert np.array_equal(out, dense(case, q, rows, kv_b, lengths))


def test_bad_arguments_are_errors() -> None:
    q, rows, kv_b = draw(SMALL, 5)
    with pytest.raises(ValueError, match="required"):
        dense(SMALL, q, rows[..., 1:], kv_b, [5])
    with pytest.raises(ValueError, match="side by side are asked for"):
        dense(SMALL, q[..., 1:], rows, kv_b, [5])
    with pytest.raises(ValueError, match="add up to 6"):
        dense(SMALL, q, rows, kv_b, [6])
