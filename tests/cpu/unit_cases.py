"""Products of bfloat16 matrices with the arithmetic of a matrix unit.

test_kernels_unit.py runs these tests with an emulated unit. RIDGELINE_MATRIX_UNIT=amx runs them on a CPU with AMX.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cpu.test_kernels_linear import SIZES, draw, meaning, poisoned, product, rng, same_bits
from ridgeline import _kernels as kernels
from ridgeline.quant.bounds import bound
from ridgeline.spec.quant import format_of

BLOCK = 32  # columns of one operation of a unit
TOKENS = (1, 2, 3, 4, 5, 8, 12, 13, 32, 33, 63, 130)
WAYS = ("exact", "bf16")
by_way = pytest.mark.parametrize("way", WAYS)


@pytest.fixture(scope="module")
def pool() -> Any:
    return kernels.Pool(1)


def matrix(pool: Any, weight: np.ndarray, way: Any, bias: Any = None) -> Any:
    return kernels.Matrix(pool, [weight], "float32", "bf16", 0, [bias], False, tokens=way)


def rounded(x: np.ndarray) -> np.ndarray:
    return x.astype(ml_dtypes.bfloat16).astype(np.float32)


def slices(x: np.ndarray, way: str) -> list[np.ndarray]:
    """Return the numbers of bfloat16 whose sum a token is."""
    high = rounded(x)
    return [high] if way == "bf16" else [high, rounded(x - high)]


def in_numpy(x: np.ndarray, w: np.ndarray, way: str) -> np.ndarray:
    """Return the product by the published operation of TDPBF16PS.

    Numbers must be so close to each other in size that float64 holds each sum before it is rounded.
    """
    pad = ((0, 0), (0, -x.shape[1] % BLOCK))
    parts, weights = [np.pad(s, pad).astype(np.float64) for s in slices(x, way)], np.pad(w, pad)
    total = np.zeros((len(x), len(w)), np.float32)
    for start in range(0, weights.shape[1], BLOCK):
        for part in parts:
            chains = np.zeros((2, *total.shape), np.float32)
            for k in range(start, start + BLOCK):
                exact = chains[k % 2] + part[:, k, None] * weights[None, :, k]
                chains[k % 2] = exact.astype(np.float32)
            total += chains[0] + chains[1]
    return total


@by_way
def test_the_unit_serves_bf16(pool: Any, way: str) -> None:
    w = matrix(pool, draw(33, 64), way)
    assert kernels.matrix_unit() != "none" and kernels.bf16_refusal() == ""
    assert (w.in_tiles, w.unit_from) == (True, 1 if kernels.matrix_unit() == "amx" else 4)
    for name in ("fp32", "fp16"):
        other = kernels.Matrix(pool, [draw(33, 64)], "float32", name, 0, [None], False)
        assert (other.in_tiles, other.unit_from) == (False, None)
        with pytest.raises(ValueError, match="no matrix unit serves this format from 5 tokens on"):
            other.unit_from = 5


@by_way
@pytest.mark.parametrize("n_out", SIZES)
@pytest.mark.parametrize("n_in", SIZES)
def test_products_are_within_the_bound(pool: Any, way: str, n_in: int, n_out: int) -> None:
    weight, bias, x = draw(n_out, n_in), draw(n_out, key=1), draw(37, n_in, key=2)
    w = matrix(pool, weight, way, bias)
    mean, wide, added = meaning(pool, w), x.astype(np.float64), bias.astype(np.float64)
    allowed = bound(wide, mean, added, format_of("auto", way), in_tiles=True)
    for unit_from in (1, None):
        w.unit_from = unit_from
        assert (np.abs(product(pool, w, poisoned(x)) - (wide @ mean.T + added)) <= allowed).all()


def test_the_bound_is_not_too_large() -> None:
    """One slice is 2^8 times less accurate than two, and two of fewer bits would not pass."""
    one = np.ones((1, 257))

    def share(way: str) -> float:
        return float(bound(one, one, np.zeros(1), format_of("auto", way), in_tiles=True)[0, 0]) / 257

    assert 2.0**-17 < share("exact") < 1.4 * 2.0**-17
    assert 2.0**-8 < share("bf16") < 1.01 * 2.0**-8


@by_way
@pytest.mark.parametrize("columns", [1, 63, 100, 257])
def test_the_bits_of_the_published_operation(pool: Any, way: str, columns: int) -> None:
    weight, x = rounded(draw(70, columns, spread=1.0)), draw(40, columns, spread=1.0, key=1)
    w = matrix(pool, weight, way)
    wanted = in_numpy(x, weight, way)
    for unit_from in (1, None):
        w.unit_from = unit_from
        assert same_bits(product(pool, w, x), wanted)


@by_way
@pytest.mark.parametrize(("rows", "columns"), [(100, 257), (290, 1100)])
def test_a_token_is_the_same_in_every_batch(pool: Any, way: str, rows: int, columns: int) -> None:
    """It is alone, among 256 others, first or last, in every order, with each number of threads; by the unit and by
    vectors.
    """
    w, x = matrix(pool, draw(rows, columns), way, draw(rows, key=1)), draw(257, columns, key=2)
    w.unit_from = None
    whole = product(pool, w, x)
    order = rng().permutation(33)
    for unit_from in (None, 1, 5, 33):
        w.unit_from = unit_from
        for tokens in TOKENS if unit_from is None or rows == 100 else (33,):
            assert same_bits(product(pool, w, x[:tokens]), whole[:tokens])
            assert same_bits(product(pool, w, x[-tokens:]), whole[-tokens:])
        assert same_bits(product(pool, w, x[:33][order]), whole[:33][order])
        for threads in (2, 3):
            crowd = kernels.Pool(threads)
            assert all(same_bits(product(crowd, w, x[:n]), whole[:n]) for n in (1, 7, 33))


def of_all_sizes(*shape: int, key: int) -> np.ndarray:
    """Return numbers whose products and sums are often denormal or cancel. In half of the rows some are much larger."""
    r = rng(key, *shape)
    is_mixed = (r.random(shape) < 0.3) & (np.arange(shape[0])[:, None] % 2 > 0)
    exponents = np.where(is_mixed, r.integers(-148, 20, shape), r.integers(-70, -62, shape))
    x = (r.normal(size=shape) * 2.0**exponents).astype(np.float32)
    x[:, 1::7] = -x[:, ::7][:, : x[:, 1::7].shape[1]]
    return x


@by_way
def test_the_unit_and_vectors_agree_on_numbers_of_all_sizes(pool: Any, way: str) -> None:
    w, x = matrix(pool, of_all_sizes(100, 257, key=1), way), of_all_sizes(63, 257, key=2)
    whole = product(pool, w, x)
    w.unit_from = None
    assert same_bits(product(pool, w, x), whole)
    smallest = np.abs(whole[whole != 0]).min()
    assert 2.0**-126 <= smallest < 2.0**-120  # some sums are nearly denormal, and none is


@by_way
def test_numbers_at_the_edge(pool: Any, way: str) -> None:
    """Infinities stay in exact tokens and in bf16. The largest floats become infinite in bf16 only, where they round to
    2^128. A token that is not finite harms no other.
    """
    largest = np.finfo(np.float32).max
    x = draw(6, 64, key=3)
    clean = x.copy()
    x[1, :], x[2, 5], x[3, 5] = 0, np.inf, np.nan
    x[1, 5] = largest
    w = matrix(pool, np.where(np.arange(64) == 5, 0.5, 0).astype(np.float32)[None].repeat(33, 0), way)
    for unit_from in (1, None):
        w.unit_from = unit_from
        got = product(pool, w, x)
        assert (got[1] == np.inf).all() if way == "bf16" else np.abs(got[1] / (largest / 2) - 1).max() < 2.0**-16
        assert (got[2] == np.inf).all() and np.isnan(got[3]).all()
        assert same_bits(np.delete(got, [1, 2, 3], 0), np.delete(product(pool, w, clean), [1, 2, 3], 0))
