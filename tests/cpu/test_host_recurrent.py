"""Recurrent primitives in numpy: equal to their definition in torch, and equal in chunks and token by token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from oracle.problems import NUMPY, SIZES, STORED, Array, Problem, check, each, normal, poisoned
from ridgeline.ops import api
from ridgeline.ops.api import Op
from ridgeline.ops.host import recurrent
from ridgeline.spec import (
    S4,
    S4D,
    GatedDelta,
    KimiDelta,
    LightningAttention,
    Mamba,
    Mamba2,
    RMSNorm,
    TaylorAttention,
)

D, S, H, P, G = 6, 5, 4, 3, 2
MAMBA, MAMBA2 = Mamba(D, S, 4, 2), Mamba2(H, P, S, G, 4, RMSNorm(1e-5), dt_least=0.05, dt_most=2.0)
TAYLOR = TaylorAttention(num_heads=2, head_dim=3, feature_dim=4)
HEDGEHOG = replace(TAYLOR, features="hedgehog")
LIGHTNING = LightningAttention(num_heads=3, head_dim=4, norm=RMSNorm())
DELTA = GatedDelta(num_heads=4, num_key_heads=2, key_dim=6, head_dim=5, conv_size=4, norm=RMSNorm())
KIMI = KimiDelta(num_heads=3, head_dim=6, conv_size=4, rank=4, norm=RMSNorm())
DECAYS = np.linspace(-2, 1.5, D * S, dtype=np.float32).reshape(D, S)
Scan = Callable[[tuple[Array, ...], Array, Array], tuple[Array, Array]]


def mamba(along: tuple[Array, ...], h: Array, lengths: Array) -> tuple[Any, ...]:
    x, dt, b, c = along
    return x, dt, DECAYS, b, c, np.linspace(-1, 1, D, dtype=np.float32), h, lengths


def mamba2(along: tuple[Array, ...], h: Array, lengths: Array) -> tuple[Any, ...]:
    x, dt, b, c = along
    bias, a_log, d = (np.linspace(-1, 1, H, dtype=np.float32) * k for k in (0.5, 2.0, 1.0))
    return x, dt, bias, a_log, b, c, d, h, lengths


def linear(along: tuple[Array, ...], h: Array, lengths: Array) -> tuple[Any, ...]:
    return *along, h, lengths


def state_space(along: tuple[Array, ...], h: Array, lengths: Array) -> tuple[Any, ...]:
    """Return S4D's system: steps from 1/50 to 1/2, decays from slow to fast."""
    log_dt = np.linspace(-4, -0.7, D, dtype=np.float32)
    a_log, a_imag = 0.5 * normal(D, 3) - 1, 3 * np.arange(3, dtype=np.float32) + 0.3 * normal(D, 3, seed=1)
    return *along, log_dt, a_log, a_imag, normal(D, 2, 3, seed=2), np.linspace(-1, 1, D, dtype=np.float32), h, lengths


def low_rank(along: tuple[Array, ...], h: Array, lengths: Array) -> tuple[Any, ...]:
    """Return S4's system, which also has P and B."""
    plain = state_space(along, h, lengths)
    return *plain[:4], normal(D, 2, 3, seed=3), normal(D, 2, 3, seed=4), *plain[4:]


def delta(along: tuple[Array, ...], h: Array, lengths: Array) -> tuple[Any, ...]:
    heads, decays = h.shape[1], along[3].shape[-1]
    return *along, np.linspace(-2, 1.5, heads, dtype=np.float32), normal(decays), h, lengths


SCANS: dict[str, tuple[Op[Any], object, Any, tuple[int | tuple[int, ...], ...], tuple[int, ...]]] = {
    "mamba": (api.SELECTIVE_SCAN, MAMBA, mamba, (D, D, S, S), (D, S)),
    "mamba2": (api.SSD, MAMBA2, mamba2, (H * P, H, G * S, G * S), (H, P, S)),
    "taylor": (api.TAYLOR_ATTENTION, TAYLOR, linear, (8, 8, 6), (2, 4, 21)),
    "hedgehog": (api.TAYLOR_ATTENTION, HEDGEHOG, linear, (8, 8, 6), (2, 4, 8)),
    "lightning": (api.LIGHTNING_ATTENTION, LIGHTNING, linear, ((3, 4),) * 3, (3, 4, 4)),
    "s4": (api.STATE_SPACE, S4(D, 6), low_rank, (D,), (D, 2, 3)),
    "s4d": (api.STATE_SPACE, S4D(D, 6), state_space, (D,), (D, 2, 3)),
    "delta": (api.DELTA_RULE, DELTA, delta, (12, 12, 20, 4, 4), (4, 6, 5)),
    "kimi": (api.DELTA_RULE, KIMI, delta, (18, 18, 18, 18, 3), (3, 6, 6)),
}


def scanned(name: str, n: int, m: int) -> tuple[tuple[Array, ...], Array]:
    """Return inputs of n sequences of m tokens, and their states before."""
    op, _, _, sizes, state = SCANS[name]
    h = np.zeros((n, *state), np.float32) if op is api.TAYLOR_ATTENTION else normal(n, *state)
    shapes = (size if isinstance(size, tuple) else (size,) for size in sizes)
    return tuple(normal(n, m, *shape, seed=i) for i, shape in enumerate(shapes)), h


@pytest.mark.parametrize("size", [*SIZES, 16, 64])
@pytest.mark.parametrize("name", SCANS)
def test_scans(name: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    op, case, arguments, _, _ = SCANS[name]
    along, h = scanned(name, 3, size)
    check(Problem(op, case, arguments(along, h, np.full(3, size)), 2e-5))
    monkeypatch.setattr(recurrent, "SCAN_BLOCK", 500)  # so that a few chunks are computed at a time
    check(Problem(op, case, arguments(along, h, np.full(3, size)), 2e-5))


@pytest.mark.parametrize("name", SCANS)
def test_chunks_are_the_recurrence(name: str) -> None:
    """In float64, results are equal for whole sequences, token by token and in parts of any
    length, with any padding.
    """
    op, case, arguments, _, _ = SCANS[name]
    (along, h), kernel = each(scanned(name, 2, 100), lambda x: x.astype(np.float64)), NUMPY.primitive(op, case)
    y, last = kernel(*arguments(along, h, np.full(2, 100)))
    for parts in ((1,) * 100, (37, 63), (16, 48, 36), (99, 1)):
        state, at, ys = h, 0, []
        for n in parts:
            part, state = kernel(*arguments(tuple(x[:, at : at + n] for x in along), state, np.full(2, n)))
            ys.append(part)
            at += n
        np.testing.assert_allclose(np.concatenate(ys, 1), y, rtol=1e-10, atol=1e-10)
        np.testing.assert_allclose(state, last, rtol=1e-10, atol=1e-10)
    short, left = kernel(*arguments(along, h, np.array([100, 41])))
    alone, own = kernel(*arguments(tuple(x[1:, :41] for x in along), h[1:], np.array([41])))
    np.testing.assert_allclose(short[1:, :41], alone, rtol=1e-10, atol=1e-10)
    np.testing.assert_allclose(left[1:], own, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dtype", STORED)
@pytest.mark.parametrize("m", [1, 2, 7, 63])
def test_short_convolution(m: int, dtype: str) -> None:
    lengths = np.array([m, max(1, m - 1)])
    weight = normal(5, 1, 4, dtype=dtype)
    for bias in (None, normal(5)):
        check(Problem(api.SHORT_CONV, None, (normal(2, m, 5), normal(2, 3, 5), weight, bias, lengths)))


def test_states_are_read_and_written_in_place() -> None:
    pages = poisoned(np.full((4, 2, 3), np.nan, np.float32))
    pages[2] = 5.0
    states = NUMPY.primitive(api.READ_STATE, None)(pages, np.array([0, 2, 3]), np.array([1, 0, 1]), np.array([1, 2, 3]))
    assert (states[0] == 0).all() and (states[1] == 5).all() and (states[2] == 0).all()
    states[1] = 7.0
    NUMPY.primitive(api.WRITE_STATE, None)(pages, np.array([1]), np.ones((1, 2, 3), np.float32))
    assert (pages[1] == 1).all() and (pages[2] == 5).all() and np.isnan(pages[[0, 3]]).all()
