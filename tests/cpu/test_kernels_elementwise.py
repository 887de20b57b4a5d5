"""Elementwise functions by kernels, compared with float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from ridgeline.ops import api
from ridgeline.ops.api import SlotTerms
from ridgeline.ops.host import primitives as host_primitives
from ridgeline.ops.reference import primitives, recurrent
from ridgeline.spec import MLP, ClampedSwiGLU, GatedMLP, Mamba2, MoE, RMSNorm, Ungated

kernels = pytest.importorskip("ridgeline._kernels", reason="the kernels of csrc/ are not built")
from ridgeline.ops.cpu.primitives import KERNELS  # noqa: E402

Array = np.ndarray[Any, Any]
POOLS = {n: kernels.Pool(n) for n in (1, 2, 4)}
SHAPES = [(1, 1), (1, 63), (3, 100), (2, 5, 257), (40, 4097)]


def draw(*shape: int, seed: int = 0) -> Array:
    x = np.random.default_rng(seed).standard_normal(shape, dtype=np.float32) * 4
    x.flat[0] = 1e-30
    x.flat[-1] = -90.0
    return x


def wide(*arrays: Array) -> list[torch.Tensor]:
    return [torch.from_numpy(a).double() for a in arrays]


def check(op: Any, case: Any, definition: Any, arrays: tuple[Array, ...], *numbers: float) -> None:
    wanted = definition(*wide(*arrays), *numbers).numpy()
    first: Array | None = None
    for pool in POOLS.values():
        kernel = KERNELS[op].make(case, pool)
        found = kernel(*arrays, *numbers)
        # The inputs are columns of a larger matrix of NaN.
        views = []
        for a in arrays:
            room = np.full((*a.shape[:-1], a.shape[-1] + 2), np.nan, np.float32)
            room[..., 1:-1] = a
            views.append(room[..., 1:-1] if a.ndim > 1 else a)
        assert np.array_equal(kernel(*views, *numbers), found)
        assert first is None or np.array_equal(first, found)
        first = found
        np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_plain_functions(shape: tuple[int, ...]) -> None:
    a, b = draw(*shape), draw(*shape, seed=1)
    for factor in (1.0, 0.22):
        check(api.ADD, None, primitives.add, (a, b), factor)
    check(api.MULTIPLY, None, recurrent.multiply, (a, b))
    check(api.GATE, None, recurrent.gate, (a, b))
    check(api.SIGMOID_GATE, None, recurrent.sigmoid_gate, (a, b))
    check(api.JOIN, None, primitives.join, (a, b))
    check(api.SIGMOID_GATE, None, recurrent.sigmoid_gate, (a, b[..., :1].copy()))
    check(api.SCALE, None, primitives.scale, (a,), 0.3)
    check(api.SOFTCAP, None, primitives.softcap, (a,), 5.0)


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "relu", "relu2"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_activations(shape: tuple[int, ...], activation: Any) -> None:
    a, b = draw(*shape), draw(*shape, seed=1)
    mlp, gated = MLP(4, activation), GatedMLP(4, activation)
    check(api.ACTIVATION, mlp, primitives.activation(mlp), (a,))
    check(api.ACTIVATION, gated, primitives.activation(gated), (a, b))
    experts = MoE(2, 1, 4, Ungated(activation))
    check(api.ACTIVATION, experts, primitives.activation(experts), (a,))


def test_infinity_stays_itself_where_it_is_positive() -> None:
    x = np.array([np.inf, -np.inf, np.nan, -0.5, 0.5], np.float32)
    for activation, half in (("relu", 0.5), ("relu2", 0.25)):
        found = KERNELS[api.ACTIVATION].make(MLP(4, activation), POOLS[1])(x[None])  # type: ignore[arg-type]
        np.testing.assert_array_equal(found[0], [np.inf, 0.0, np.nan, 0.0, half])


def test_clamped_swiglu() -> None:
    case = MoE(2, 1, 4, ClampedSwiGLU(1.702, 7.0))
    check(api.ACTIVATION, case, primitives.activation(case), (draw(3, 100), draw(3, 100, seed=1)))


@pytest.mark.parametrize("groups", [1, 2, 5])
@pytest.mark.parametrize("size", [3, 20, 64])
def test_gated_norm(groups: int, size: int) -> None:
    case = Mamba2(groups, size, 4, groups, 4, RMSNorm(1e-5, 1.0))
    y, z, weight = draw(7, groups * size), draw(7, groups * size, seed=1), draw(groups * size, seed=2) / 8
    check(api.GATED_NORM, case, recurrent.gated_norm(case), (y, z, weight))


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_one_bad_element_affects_no_other(bad: float) -> None:
    a, b = draw(4, 33), draw(4, 33, seed=1)
    kernel = KERNELS[api.ACTIVATION].make(GatedMLP(4, "silu"), POOLS[2])
    clean = kernel(a, b)
    a[2, 5] = bad
    dirty = kernel(a, b)
    same = np.ones(a.shape, bool)
    same[2, 5] = False
    assert np.array_equal(dirty[same], clean[same])


def test_an_empty_array() -> None:
    none = np.empty((0, 5), np.float32)
    assert KERNELS[api.ADD].make(None, POOLS[2])(none, none, 1.0).shape == (0, 5)


@pytest.mark.parametrize("rank", [1, 5, 16])
@pytest.mark.parametrize(("columns", "rows"), [(1, 3), (63, 100), (257, 1030)])
def test_terms_of_adapters(columns: int, rows: int, rank: int) -> None:
    slots = np.array([2, -1, 0, 1, 2, -1, 0], np.int64)
    y, x = draw(7, rows), draw(7, columns, seed=1)
    parts = draw(3, rank, columns, seed=2), draw(3, rank, rows, seed=3), draw(3, rows, seed=4), draw(3, rows, seed=5)
    ranks = np.array([rank, 0, max(1, rank - 2)], np.int64)
    for slot, count in enumerate(ranks):  # rows after the rank are never read
        parts[0][slot, count:] = parts[1][slot, count:] = np.nan
    terms = SlotTerms(*parts, ranks)
    wide = SlotTerms(*(np.nan_to_num(part.astype(np.float64)) for part in parts), ranks)
    wanted = y.astype(np.float64)
    for i, slot in enumerate(slots):
        if slot >= 0:
            inner = wide.up[slot].T @ (wide.down[slot] @ x[i].astype(np.float64))
            wanted[i] = wide.gain[slot] * y[i] + inner + wide.add[slot]
    found = [KERNELS[api.ADD_TERMS].make(None, pool)(y, x, slots, terms) for pool in POOLS.values()]
    np.testing.assert_allclose(found[0], wanted, rtol=1e-5, atol=1e-4 * np.abs(wanted).max())
    assert all(np.array_equal(other, found[0]) for other in found)
    assert np.array_equal(found[0][slots < 0], y[slots < 0])
    for i in range(7):  # a row's bits do not depend on its company
        own = slice(i, i + 1)
        assert np.array_equal(
            KERNELS[api.ADD_TERMS].make(None, POOLS[2])(y[own], x[own], slots[own], terms)[0], found[0][i]
        )
    np.testing.assert_allclose(host_primitives.add_terms(y, x, slots, terms), found[0], rtol=1e-4, atol=1e-3)
