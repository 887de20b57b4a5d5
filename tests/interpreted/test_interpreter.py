"""The interpreter as it is mended and hastened: bfloat16 is right, and wrong sizes and overflows are errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from interpreted.guarded import IS_INTERPRETED

pytestmark = pytest.mark.skipif(not IS_INTERPRETED, reason="a GPU needs no mending")


@triton.jit
def multiply(a, b, out, SIZE: tl.constexpr):
    """Write the product of two matrices [SIZE, SIZE]."""
    at = tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    tl.store(out + at, tl.dot(tl.load(a + at), tl.load(b + at)))


@triton.jit
def square(x, out):
    """Write the square of a number."""
    tl.store(out, tl.load(x) * tl.load(x))


@triton.jit
def copy(x, out, SIZE: tl.constexpr):
    """Copy SIZE numbers."""
    at = tl.arange(0, 1) + tl.zeros((SIZE,), tl.int32)
    tl.store(out + at, tl.load(x + at))


def test_products_and_casts_of_bfloat16() -> None:
    a, b = torch.randn(2, 16, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    out, narrow = torch.zeros(16, 16), torch.zeros(16, 16, dtype=torch.bfloat16)
    for found in (out, narrow):
        multiply[(1,)](a, b, found, SIZE=16)
    wanted = a.double() @ b.double()
    torch.testing.assert_close(out.double(), wanted, rtol=1e-6, atol=1e-6)
    assert torch.equal(narrow, out.bfloat16())


@pytest.mark.parametrize(("dtype", "fits"), [(torch.int32, False), (torch.int64, True), (torch.uint32, True)])
def test_an_overflow_of_signed_numbers_is_an_error(dtype: Any, fits: bool) -> None:
    """Unsigned numbers wrap around, which noise needs."""
    x, out = torch.tensor([2**20 + 1], dtype=dtype), torch.zeros(1, dtype=dtype)
    if fits:
        square[(1,)](x, out)
        assert out.tolist() == [(2**20 + 1) ** 2 % 2 ** (8 * dtype.itemsize)]
    else:
        with pytest.raises(Exception, match="int32 overflow"):
            square[(1,)](x, out)


@pytest.mark.parametrize("size", [3, 2**21])
def test_sizes_that_no_gpu_serves_are_errors(size: int) -> None:
    with pytest.raises(Exception, match=r"power of 2|exceeds triton maximum"):
        copy[(1,)](torch.zeros(1), torch.zeros(1), SIZE=size)
