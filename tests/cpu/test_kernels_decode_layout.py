"""Kernels that read and write states in their pages give the same bits as with copies, and change nothing else."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("ridgeline._kernels", reason="the kernels of csrc/ are not built")
from cpu.test_kernels_recurrent import POOLS, PROBLEMS, Problem, draw
from ridgeline.ops import api
from ridgeline.ops.cpu.backend import KERNELS

Array = np.ndarray[Any, Any]
# The first sequence keeps its page, the second moves to its next page, the third begins.
READ, FRESH, WRITE = np.array([4, 2, 0]), np.array([0, 0, 1]), np.array([4, 6, 1])
PAGES, BESIDE = 8, 3  # number of pages; numbers of another layer on each side of a page


def arena(p: Problem) -> tuple[Array, Array]:
    """Return pages that hold NaN except for two states, and the part of them that belongs to one layer."""
    size = int(np.prod(p.state))
    whole = np.full((PAGES, size + 2 * BESIDE), np.nan, np.float32)
    pages = whole[:, BESIDE : BESIDE + size].reshape(PAGES, *p.state)
    # the sums of weights in a state must be positive
    pages[[2, 4]] = np.random.default_rng(5).random((2, *p.state), dtype=np.float32)
    return whole, pages


def run(p: Problem, pages: Array, tokens: int, pool: int, *, copied: bool) -> tuple[Array, Array]:
    lengths = np.array([tokens, max(1, tokens // 2), tokens])
    inputs, _ = draw(p, 3, tokens, seed=3)
    kernel = KERNELS[p.op].make(p.case, POOLS[pool])
    states = KERNELS[api.READ_STATE].make(None, POOLS[pool])(pages, READ, FRESH, WRITE)
    y, *_, left = kernel(*p.arrange(inputs, p.weights, states[np.arange(3)] if copied else states, lengths))
    assert (left is states) != copied
    KERNELS[api.WRITE_STATE].make(None, POOLS[pool])(pages, WRITE, left)
    return np.concatenate([y[i, :n] for i, n in enumerate(lengths)]), pages


@pytest.mark.parametrize("tokens", [1, 3, 150])
@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("name", PROBLEMS)
def test_in_place_equals_copies(name: str, pool: int, tokens: int) -> None:
    p = PROBLEMS[name]
    (one, pages), (other, copies) = arena(p), arena(p)
    y, _ = run(p, pages, tokens, pool, copied=False)
    wanted, _ = run(p, copies, tokens, pool, copied=True)
    assert np.isfinite(y).all() and np.array_equal(y, wanted)
    assert np.array_equal(one, other, equal_nan=True)


def test_pages_that_do_not_exist() -> None:
    p = PROBLEMS["mamba2"]
    _, pages = arena(p)
    inputs, _ = draw(p, 1, 1)
    kernel, read = KERNELS[p.op].make(p.case, POOLS[1]), KERNELS[api.READ_STATE].make(None, POOLS[1])
    for invalid in ([PAGES], [-1]):
        states = read(pages, np.array(invalid), np.zeros(1, np.int64), np.array([1]))
        with pytest.raises(IndexError, match=r"^page (8|-1) of 8$"):
            kernel(*p.arrange(inputs, p.weights, states, np.array([1])))
    states = read(pages[:, :2], np.array([4]), np.zeros(1, np.int64), np.array([4]))
    with pytest.raises(ValueError, match="numbers, not of"):
        kernel(*p.arrange(inputs, p.weights, states, np.array([1])))
