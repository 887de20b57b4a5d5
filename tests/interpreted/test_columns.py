"""Columns of dot products do not depend on how many there are: the base of a token's bits being free of its batch.

The interpreter has this by its definition, so only a run on a GPU is a proof: tokens are columns of the dot products of
tensor cores, and blocks of 16 to 256 of them are compiled to different instructions.
"""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from interpreted.guarded import IS_INTERPRETED, interpreted, moved, start
from ridgeline.ops.triton.launch import Compiled
from ridgeline.quant import StoredLinear
from ridgeline.spec.quant import PLAIN, format_of

DEPTH, TRIES = (64, 1) if IS_INTERPRETED else (4096, 20)
COLUMNS = (16, 32, 64, 128, 256)


@triton.jit
def dots(a, b, out, depth, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr, IS_INT: tl.constexpr):
    """out [COLUMNS, ROWS] = the products of a [ROWS, depth] with b [COLUMNS, depth]."""
    row, column, at = tl.arange(0, ROWS), tl.arange(0, COLUMNS), tl.arange(0, STEP)
    total = tl.zeros([ROWS, COLUMNS], tl.int32 if IS_INT else tl.float32)
    for begin in range(0, depth, STEP):
        left = tl.load(a + row[:, None] * depth + begin + at[None, :])
        right = tl.load(b + column[:, None] * depth + begin + at[None, :])
        total = tl.dot(left, tl.trans(right), total, out_dtype=tl.int32 if IS_INT else tl.float32)
    tl.store(out + column[None, :] * ROWS + row[:, None], total)


def spread(*shape: int, seed: int) -> torch.Tensor:
    """Return noise over eight powers of two, whose sums are rounded at every step."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator) * 2 ** -(torch.rand(shape, generator=generator) * 8)


def product(a: torch.Tensor, b: torch.Tensor, warps: int) -> torch.Tensor:
    is_int = a.dtype == torch.int8
    out = torch.full((len(b), len(a)), -7, dtype=torch.int32 if is_int else torch.float32)
    start(
        dots, (1,), Compiled(warps, 2), a=a, b=b, out=out, depth=a.shape[1], ROWS=len(a), COLUMNS=len(b),
        STEP=32 if is_int else 16, IS_INT=is_int,
    )  # fmt: skip
    return out


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int8])
def test_a_column_has_the_same_bits_among_any_number_of_columns(dtype: torch.dtype) -> None:
    """Column j of 256 equals column 0 of 16, 32, 64 and 128, whatever stands beside it, at every position j tried."""
    for seed in range(TRIES):
        a, b = spread(64, DEPTH, seed=seed), spread(max(COLUMNS), DEPTH, seed=1000 + seed)
        if dtype == torch.int8:
            a, b = (x * 127 / x.abs().max() for x in (a, b))
        a, b = a.to(dtype), b.to(dtype)
        whole = product(a, b, 4)
        wanted = b.double() @ a.double().T
        assert (whole - wanted).abs().max() <= DEPTH * 2.0**-20 * wanted.abs().max() * (dtype != torch.int8)
        for count in COLUMNS[:-1]:
            for first in (0, max(COLUMNS) - count, 48):
                some = product(a, b[first : first + count].contiguous(), 4)
                assert torch.equal(some, whole[first : first + count]), (count, first)
        assert torch.equal(product(a, b, 8), whole), "the number of warps changes a sum"


@pytest.mark.parametrize("name", ["plain", "fp8", "int4-128"])
def test_a_token_has_the_same_bits_in_any_batch_of_a_product(name: str) -> None:
    columns, rows, tokens = (128, 64, 70) if IS_INTERPRETED else (4096, 512, 300)
    format = PLAIN if name == "plain" else format_of(name)
    stored = StoredLinear(spread(rows, columns, seed=1).bfloat16(), None, interpreted(), format)
    stored.prepare()
    x = spread(tokens, columns, seed=2)
    whole = stored.apply(x)
    for count in (1, 33) if IS_INTERPRETED else (1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 128, 256):
        for first in (0, tokens - count):
            assert torch.equal(stored.apply(x[first : first + count]), whole[first : first + count]), (count, first)


def test_kernels_over_copies_write_what_they_write_in_place() -> None:
    """A GPU gets copies of the arguments, with their strides, and views of one array stay views of one."""
    both = torch.arange(24.0).view(4, 6)
    given, copies = moved({"a": both[:, :2], "b": both[1:, 3:], "n": 3, "none": None}, "cpu")
    assert given["a"].stride() == (6, 1) and torch.equal(given["b"], both[1:, 3:]) and given["n"] == 3
    assert len(copies) == 1 and given["a"].untyped_storage().data_ptr() != both.untyped_storage().data_ptr()
    given["a"][3, 1] = -1.0
    for own, copy in copies:
        own.copy_(copy)
    assert both[3, 1] == -1.0 and both.sum() == 276 - 19 - 1
