"""Products of bfloat16 matrices with tokens rounded to bfloat16: within their bound, and the same bits in any batch.

The tests hold with the processor's dot products of bf16 (`Matrix.in_dots`) and without them, where tokens and weights
are widened. Only one of them needs the instruction.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

kernels = pytest.importorskip("ridgeline._kernels", reason="the kernels of csrc/ are not built")
from cpu.instruction_sets import ISAS  # noqa: E402
from cpu.test_kernels_linear import SIZES, draw, meaning, poisoned, product, rng, run_with, same_bits  # noqa: E402
from ridgeline.quant.bounds import bound  # noqa: E402
from ridgeline.spec.quant import format_of  # noqa: E402

TOKENS = (1, 2, 3, 4, 5, 11, 12, 13, 25, 96, 97, 130)
BRAIN = format_of("auto", "bf16")
HERE = Path(__file__).parent
Array = np.ndarray[Any, Any]


@pytest.fixture(scope="module")
def pool() -> Any:
    return kernels.Pool(1)


def matrix(pool: Any, weight: Array, bias: Any = None) -> Any:
    return kernels.Matrix(pool, [weight], "float32", "bf16", 0, [bias], False, tokens="bf16")


def of_all_sizes(*shape: int, key: int) -> Array:
    """Return numbers whose products and sums are often denormal or cancel. In half of the rows some are much larger."""
    r = rng(key, *shape)
    is_mixed = (r.random(shape) < 0.3) & (np.arange(shape[0])[:, None] % 2 > 0)
    exponents = np.where(is_mixed, r.integers(-148, 20, shape), r.integers(-70, -62, shape))
    x: Array = (r.normal(size=shape) * 2.0**exponents).astype(np.float32)
    x[:, 1::7] = -x[:, ::7][:, : x[:, 1::7].shape[1]]
    return x


def error_and_bound(pool: Any, x: Array, weight: Array, bias: Array) -> tuple[Array, Array]:
    w = matrix(pool, weight, bias)
    wide, mean, added = x.astype(np.float64), meaning(pool, w), bias.astype(np.float64)
    error = np.abs(product(pool, w, poisoned(x)) - (wide @ mean.T + added))
    return error, bound(wide, mean, added, BRAIN, in_dots=w.in_dots)


@pytest.mark.parametrize("n_out", SIZES)
@pytest.mark.parametrize("n_in", SIZES)
def test_products_are_within_the_bound(pool: Any, n_in: int, n_out: int) -> None:
    bias = draw(n_out, key=1)
    error, allowed = error_and_bound(pool, draw(37, n_in, key=2), draw(n_out, n_in), bias)
    assert (error <= allowed).all()
    error, allowed = error_and_bound(
        pool, of_all_sizes(37, n_in, key=2), of_all_sizes(n_out, n_in, key=1), np.zeros_like(bias)
    )
    assert (error <= allowed).all()


def test_the_bound_is_not_too_large() -> None:
    """It grows with the number of columns, and tokens with one bit less would not pass."""
    one = np.ones((1, 257))
    share = float(bound(one, one, np.zeros(1), BRAIN, in_dots=True)[0, 0]) / 257
    assert 2.0**-8 < share < 1.01 * 2.0**-8


UNIT = 300  # whole numbers below count 2^-300, of which every product of two numbers of bf16 is a multiple


def whole(x: Array) -> list[list[int]]:
    """Return numbers in bf16 in units of 2^-150. Denormal ones are zeros."""
    near = x.astype(ml_dtypes.bfloat16).astype(np.float64)
    kept = np.where(np.abs(near) < 2.0**-126, 0, near)
    return [[int(v) for v in row] for row in np.ldexp(kept, UNIT // 2)]


def rounded(n: int) -> int:
    """Round to 24 bits, ties to even. Denormal results are zeros."""
    size = abs(n)
    drop = max(0, size.bit_length() - 24)
    if drop:
        size = (size + (1 << (drop - 1)) - 1 + (size >> drop & 1)) >> drop << drop
    return 0 if size < 1 << (UNIT - 126) else size if n > 0 else -size


def published(x: Array, w: Array) -> Array:
    """Return the product by the operation that Intel publishes for VDPBF16PS, in whole numbers.

    For each pair of columns, the product of the odd one is added and rounded, and then that of the even one (Software
    Developer's Manual, volume 2).
    """
    sums = np.zeros((len(x), len(w)), np.float32)
    columns = [k ^ 1 for k in range(x.shape[1] + x.shape[1] % 2) if (k ^ 1) < x.shape[1]]
    for i, token in enumerate(whole(x)):
        for j, row in enumerate(whole(w)):
            total = 0
            for k in columns:
                total = rounded(total + token[k] * row[k])
            sums[i, j] = math.ldexp(float(total), -UNIT)
    return sums


@pytest.mark.parametrize("columns", [1, 63, 100, 257])
def test_the_bits_of_the_published_operation(pool: Any, columns: int) -> None:
    if kernels.dots_refusal():
        pytest.skip(kernels.dots_refusal())
    for make in (of_all_sizes, lambda *shape, key: draw(*shape, key=key)):
        x, weight = make(13, columns, key=2), make(17, columns, key=1).astype(ml_dtypes.bfloat16).astype(np.float32)
        w = matrix(pool, weight)
        assert w.in_dots and not w.in_tiles
        got = product(pool, w, x)
        assert np.array_equal(got, published(x, weight))
        assert (np.abs(got[got != 0]) >= 2.0**-126).all()


@pytest.mark.parametrize(("rows", "columns"), [(100, 257), (70, 3001)])
def test_a_token_is_the_same_in_every_batch(pool: Any, rows: int, columns: int) -> None:
    """It is alone, among 540 others, first or last, in every order, with each number of threads.

    k is odd, and is divided into other ranges for few tokens than for many.
    """
    w, x = matrix(pool, draw(rows, columns), draw(rows, key=1)), draw(540, columns, key=2)
    every = product(pool, w, x)
    for tokens in TOKENS:
        assert same_bits(product(pool, w, x[:tokens]), every[:tokens])
        assert same_bits(product(pool, w, x[-tokens:]), every[-tokens:])
    order = rng().permutation(33)
    assert same_bits(product(pool, w, x[:33][order]), every[:33][order])
    for threads in (2, 3):
        crowd = kernels.Pool(threads)
        assert all(same_bits(product(crowd, w, x[:n]), every[:n]) for n in (1, 7, 33, 130))


def test_tokens_are_rounded(pool: Any) -> None:
    """A product has the bits of one with tokens that were rounded to bfloat16 before, ties to even."""
    x = draw(9, 130)
    x[0] = np.float32(1 + 2.0**-8)
    w = matrix(pool, draw(33, 130))
    assert same_bits(product(pool, w, x), product(pool, w, x.astype(ml_dtypes.bfloat16).astype(np.float32)))


@pytest.mark.parametrize("tokens", [1, 6, 130])
def test_numbers_at_the_edge(pool: Any, tokens: int) -> None:
    """Infinities and NaN stay. The largest floats round to 2^128, which is infinite. No other token changes."""
    x = draw(tokens, 63, key=3)
    weight = np.where(np.arange(63) == 5, 0.5, 0).astype(np.float32)[None].repeat(33, 0)
    w = matrix(pool, weight)
    clean, at = product(pool, w, x), tokens // 2
    for bad, wanted in ((np.inf, np.inf), (-np.inf, -np.inf), (np.finfo(np.float32).max, np.inf), (np.nan, np.nan)):
        given = x.copy()
        given[at] = 0
        given[at, 5] = bad
        got = product(pool, w, given)
        assert np.array_equal(got[at], np.full(33, wanted), equal_nan=True)
        assert same_bits(np.delete(got, at, 0), np.delete(clean, at, 0))


def test_denormal_numbers(pool: Any) -> None:
    """Dot products take them as zeros, in tokens and in weights, and give zeros for them."""
    tiny, one = np.full((2, 64), 2.0**-130, np.float32), np.ones((2, 64), np.float32)
    for x, weight in ((tiny, one), (one, tiny)):
        w = matrix(pool, weight)
        assert np.array_equal(product(pool, w, x), np.full((2, 2), 0 if w.in_dots else 2.0**-124))
    small = np.full((2, 2), 2.0**-64, np.float32)
    w = matrix(pool, small)
    assert np.array_equal(product(pool, w, small), np.full((2, 2), 0 if w.in_dots else 2.0**-127))


@pytest.mark.parametrize("isa", ISAS)
def test_one_instruction_set_uses_them(isa: str) -> None:
    """Others say why not. Matrices with exact tokens never use them."""
    code = "import test_kernels_dots as t; print(t.kernels.dots_refusal() or 'used', *map(t.uses, ('bf16', 'exact')))"
    run = run_with(isa, "-c", f"import sys; sys.path.insert(0, {str(HERE)!r}); {code}")
    if "has no such instructions" in run.stderr:
        pytest.skip(f"this CPU has no {isa}")
    assert run.returncode == 0, run.stderr
    refusals = {f"the kernels of {isa} do not use them", "the kernels were built without them"}
    if isa == "avx512":
        refusals = {"this CPU has no avx512_bf16"}
    said, *used = run.stdout.rsplit(maxsplit=2)
    assert used == [str(said == "used"), "False"]
    assert said in refusals | ({"used"} if isa == "avx512" else set())


def uses(tokens: Any) -> bool:
    """Return whether a matrix is multiplied with dot products of bf16."""
    w = kernels.Matrix(kernels.Pool(1), [draw(3, 5)], "float32", "bf16", 0, [None], False, tokens=tokens)
    return bool(w.in_dots)
