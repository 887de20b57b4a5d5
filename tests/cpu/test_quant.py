"""Every way to store a matrix keeps its promise: `apply(x) ~= x @ dequantize().T + bias`, within its stated bound."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ridgeline.quant
from ridgeline.ops import OpsTable, open_table
from ridgeline.quant import PlainLinear
from ridgeline.spec.dtype import DTYPE_BYTES

# What builds a Linear of this scheme from a matrix in float32, a bias, and the type to store the matrix in.
Build = Callable[[np.ndarray, "np.ndarray | None", str, OpsTable], Any]
SCHEMES: dict[str, Build] = {
    "plain": lambda weight, bias, dtype, table: PlainLinear.build(
        table.memory.put(weight, "float32", dtype),
        None if bias is None else table.memory.put(bias, "float32", "float32"),
        table,
    ),
}
SIZES = st.sampled_from([1, 63, 100, 257])


@pytest.fixture(scope="module")
def table() -> OpsTable:
    return open_table("reference")


def problem(tokens: int, n_in: int, n_out: int, spread: float, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """x, weight and bias; magnitudes over `spread` powers of two, so that the sums round and cancel."""
    rng = np.random.default_rng(seed)

    def draw(*shape: int) -> np.ndarray:
        return (rng.normal(size=shape) * 2.0 ** rng.uniform(-spread, 0, shape)).astype(np.float32)

    return draw(tokens, n_in), draw(n_out, n_in), draw(n_out)


def test_every_scheme_is_here() -> None:
    exported = {name for name in ridgeline.quant.__all__ if hasattr(getattr(ridgeline.quant, name), "dequantize")}
    assert len(exported) == len(SCHEMES)


@pytest.mark.parametrize("dtype", DTYPE_BYTES)
@pytest.mark.parametrize("scheme", SCHEMES)
@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(
    tokens=SIZES,
    n_in=SIZES,
    n_out=SIZES,
    bias=st.booleans(),
    spread=st.sampled_from([0.0, 8.0]),
    seed=st.integers(0, 9),
)
def test_apply_is_within_its_bound(
    scheme: str, dtype: str, table: OpsTable, tokens: int, n_in: int, n_out: int, bias: bool, spread: float, seed: int
) -> None:
    x, weight, b = problem(tokens, n_in, n_out, spread, seed)
    linear = SCHEMES[scheme](weight, b if bias else None, dtype, table)
    memory = table.memory
    got = linear.apply(memory.put(x, "float32", "float32"))
    # Into numpy without `memory.get`, which would round a result that is not float32.
    w, got64 = (np.asarray(a.detach().double()) for a in (linear.dequantize(), got))
    wide, extra = x.astype(np.float64), b.astype(np.float64) * bias
    assert got.dtype is torch.float32
    assert linear.scheme == scheme
    error = np.abs(got64 - (wide @ w.T + extra))
    allowed = linear.bound(n_in) * (np.abs(wide) @ np.abs(w).T + np.abs(extra))
    assert (error <= allowed).all(), f"error is {np.max(error / allowed):.2f} of what the bound allows"


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_bound_is_one_that_means_something(scheme: str, table: OpsTable) -> None:
    """It grows with the sum's length, and is so tight that a sum in half precision (2^-11) would not pass."""
    linear = SCHEMES[scheme](np.ones((1, 1), np.float32), None, "float32", table)
    bounds = [linear.bound(n) for n in (1, 63, 257)]
    assert 0 < bounds[0] < bounds[1] < bounds[2] < 2.0**-12


@pytest.mark.parametrize("dtype", DTYPE_BYTES)
def test_plain_keeps_the_matrix(dtype: str, table: OpsTable) -> None:
    """Widening loses nothing: the plain scheme's matrix is the stored one, rounded once to its type."""
    _, weight, _ = problem(1, 63, 100, 8.0, 0)
    linear = SCHEMES["plain"](weight, None, dtype, table)
    assert linear.dequantize().dtype is torch.float32
    rounded = torch.from_numpy(weight).to(getattr(torch, dtype)).float()
    assert torch.equal(linear.dequantize(), rounded)
