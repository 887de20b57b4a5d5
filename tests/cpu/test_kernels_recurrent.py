"""Recurrent kernels: close to float64, and the same bits with any chunks, batches and threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from oracle.definition_recurrent import opposites
from ridgeline.ops import api
from ridgeline.ops.reference import delta as reference_delta
from ridgeline.ops.reference import lru as reference_lru
from ridgeline.ops.reference import recurrent as r
from ridgeline.ops.reference import s4 as reference_s4
from ridgeline.spec import (
    S4,
    S4D,
    GatedDelta,
    GatedLRU,
    KimiDelta,
    LightningAttention,
    Mamba,
    Mamba2,
    RMSNorm,
    TaylorAttention,
)
from ridgeline.spec.taylor import Features

kernels = pytest.importorskip("ridgeline._kernels", reason="the kernels of csrc/ are not built")
from cpu.instruction_sets import OTHERS, fingerprint_under  # noqa: E402
from ridgeline.ops.cpu.backend import KERNELS  # noqa: E402

Array = np.ndarray[Any, Any]
SIZES = (1, 63, 100, 257)
POOLS = {n: kernels.Pool(n) for n in (1, 2, 4)}


class Problem(NamedTuple):
    """An op along sequences: the sizes of its inputs, its weights, and the shape of a state."""

    op: Any
    case: Any
    widths: tuple[int, ...]
    weights: tuple[Array, ...]
    state: tuple[int, ...]
    swapped: tuple[int, int] | None  # two axes of a state that the kernels store in the opposite order
    arrange: Callable[..., tuple[Any, ...]]  # (inputs, weights, state, lengths) -> the op's arguments


LAST = (-1, -2)


def grid(low: float, high: float, *shape: int) -> Array:
    return np.linspace(low, high, int(np.prod(shape))).reshape(shape).astype(np.float32)


def conv(channels: int, k: int, bias: bool) -> Problem:
    weights = (grid(-1, 1.2, channels, 1, k), grid(-0.5, 0.5, channels))
    return Problem(api.SHORT_CONV, None, (channels,), weights, (k - 1, channels), None,
                   lambda x, w, h, n: (*x, h, w[0], w[1] if bias else None, n))  # fmt: skip


def mamba(channels: int, states: int) -> Problem:
    case = Mamba(inner_size=channels, state_size=states, conv_size=4, dt_rank=2)
    weights = (grid(-2, 1.5, channels, states), grid(-1, 1, channels))
    return Problem(api.SELECTIVE_SCAN, case, (channels, channels, states, states), weights, (channels, states), LAST,
                   lambda x, w, h, n: (x[0], x[1], w[0], x[2], x[3], w[1], h, n))  # fmt: skip


def mamba2(heads: int, dim: int, states: int, groups: int, limits: tuple[float, float | None] = (0.0, None)) -> Problem:
    case = Mamba2(heads, dim, states, groups, 4, RMSNorm(1e-5), dt_least=limits[0], dt_most=limits[1])
    weights = (grid(-0.5, 0.5, heads), grid(-2, 1.5, heads), grid(-1, 1, heads))
    widths = (heads * dim, heads, groups * states, groups * states)
    return Problem(api.SSD, case, widths, weights, (heads, dim, states), LAST,
                   lambda x, w, h, n: (x[0], x[1], w[0], w[1], x[2], x[3], w[2], h, n))  # fmt: skip


def based(heads: int, dim: int, features: int, kind: Features = "taylor") -> Problem:
    case = TaylorAttention(heads, dim, features, kind)
    return Problem(api.TAYLOR_ATTENTION, case, (heads * features, heads * features, heads * dim), (),
                   (heads, dim + 1, case.num_features), LAST, lambda x, w, h, n: (*x, h, n))  # fmt: skip


def lightning(heads: int, dim: int) -> Problem:
    case = LightningAttention(heads, dim, RMSNorm(1e-5))
    return Problem(api.LIGHTNING_ATTENTION, case, (heads * dim,) * 3, (), (heads, dim, dim), LAST,
                   lambda x, w, h, n: (*(a.reshape(*a.shape[:2], heads, dim) for a in x), h, n))  # fmt: skip


def delta(heads: int, key_heads: int, key: int, dim: int) -> Problem:
    case = GatedDelta(heads, key_heads, key, dim, 4, RMSNorm(1e-5))
    widths = (key_heads * key, key_heads * key, heads * dim, heads, heads)
    return Problem(api.DELTA_RULE, case, widths, (grid(-2, 1.5, heads), grid(-1, 1, heads)), (heads, key, dim), None,
                   lambda x, w, h, n: (*x, *w, h, n))  # fmt: skip


def kimi(heads: int, dim: int) -> Problem:
    case, inner = KimiDelta(heads, dim, 4, 8, RMSNorm(1e-5)), heads * dim
    weights = (grid(-2, 1.5, heads), grid(-1, 1, inner))
    return Problem(api.DELTA_RULE, case, (inner, inner, inner, inner, heads), weights, (heads, dim, dim), None,
                   lambda x, w, h, n: (*x, *w, h, n))  # fmt: skip


def lru(channels: int) -> Problem:
    """Return the gated linear recurrent unit in sequences that have begun."""
    case, weights = GatedLRU(channels, 1, 4), (grid(-6, 1, channels),)
    return Problem(api.GATED_LRU, case, (channels,) * 3, weights, (channels,), None,
                   lambda x, w, h, n: (*x, w[0], 0 * x[0][:, 0, :1] + 1, h, n))  # fmt: skip


def state_space(case: S4 | S4D) -> Problem:
    c, modes = case.channels, case.state_size // 2
    low_rank = (grid(-0.9, 1, c, 2, modes), grid(1, -0.8, c, 2, modes)) if isinstance(case, S4) else ()
    weights = (grid(-4, -0.7, c), grid(0.3, -1.5, c, modes), grid(0.1, 9, c, modes), *low_rank,
               grid(-1, 0.8, c, 2, modes), grid(-1, 1, c))  # fmt: skip
    return Problem(api.STATE_SPACE, case, (c,), weights, (c, 2, modes), (-1, -3), lambda x, w, h, n: (x[0], *w, h, n))


PROBLEMS = {
    "conv": conv(37, 4, True), "conv 2": conv(16, 2, False),
    "mamba": mamba(50, 16), "mamba 5": mamba(6, 5),
    "mamba2": mamba2(4, 64, 32, 2), "mamba2 odd": mamba2(6, 3, 5, 1, (0.05, 2.0)), "mamba2 33": mamba2(2, 33, 17, 2),
    "lightning": lightning(2, 64), "lightning odd": lightning(3, 7), "lightning 33": lightning(2, 33),
    "delta": delta(4, 2, 64, 128), "delta odd": delta(6, 3, 5, 3), "delta 33": delta(2, 2, 17, 33),
    "kimi": kimi(2, 64), "kimi odd": kimi(3, 5), "kimi 33": kimi(1, 33),
    "s4": state_space(S4(50, 16)), "s4 odd": state_space(S4(3, 6)), "s4d": state_space(S4D(33, 64)),
    "s4d odd": state_space(S4D(16, 2)),
    "lru": lru(70), "lru odd": lru(5),
    "based": based(2, 64, 8), "based odd": based(3, 5, 3), "based 31": based(1, 31, 4),
    "hedgehog": based(2, 64, 40, "hedgehog"), "hedgehog odd": based(3, 5, 3, "hedgehog"),
}  # fmt: skip
by_problem = pytest.mark.parametrize("name", PROBLEMS)


def draw(p: Problem, n: int, m: int, seed: int = 0) -> tuple[list[Array], Array]:
    rng = np.random.default_rng(seed)
    inputs = [rng.standard_normal((n, m, w), dtype=np.float32) for w in p.widths]
    h = rng.standard_normal((n, *p.state), dtype=np.float32)
    if p.op is api.TAYLOR_ATTENTION:
        h = np.zeros_like(h) + (h**2 if seed < 0 else 0)
    return inputs, h


def theirs(p: Problem, inputs: list[Array], h: Array, lengths: Array) -> tuple[Array, Array]:
    functions = {
        api.SHORT_CONV: r.short_conv, api.SELECTIVE_SCAN: r.selective_scan, api.SSD: r.ssd,
        api.TAYLOR_ATTENTION: r.taylor_attention, api.LIGHTNING_ATTENTION: r.lightning_attention,
        api.DELTA_RULE: reference_delta.delta_rule, api.STATE_SPACE: reference_s4.state_space,
        api.GATED_LRU: reference_lru.gated_lru,
    }  # fmt: skip
    run = functions[p.op] if p.case is None else functions[p.op](p.case)
    x, w = [torch.from_numpy(a).double() for a in inputs], [torch.from_numpy(a).double() for a in p.weights]
    y, *_, left = run(*p.arrange(x, w, torch.from_numpy(h).double(), torch.from_numpy(lengths)))
    return y.numpy(), left.numpy()


def run(p: Problem, inputs: list[Array], h: Array, lengths: Array, pool: int = 1) -> tuple[Array, Array]:
    """Run the kernel with states in the shape of the spec."""
    kernel = KERNELS[p.op].make(p.case, POOLS[pool])
    axes = p.swapped or (0, 0)
    kept = np.ascontiguousarray(np.swapaxes(h, *axes))
    y, *_, left = kernel(*p.arrange(inputs, p.weights, kept.reshape(h.shape), lengths))
    return y, np.swapaxes(left.reshape(kept.shape), *axes)


@pytest.mark.parametrize("size", SIZES)
@by_problem
def test_against_the_definition(name: str, size: int) -> None:
    p = PROBLEMS[name]
    inputs, h = draw(p, 2, size)
    lengths = np.full(2, size)
    (y, left), (wanted_y, wanted_left) = run(p, inputs, h, lengths), theirs(p, inputs, h, lengths)
    # A sum of weights of BASED may be small, which makes its error large; other ops sum numbers larger than their
    # result.
    scales = [1.0, 1.0]
    if p.op in (api.TAYLOR_ATTENTION, api.LIGHTNING_ATTENTION, api.STATE_SPACE):
        scales = [max(1.0, np.abs(a).max()) for a in (wanted_y, wanted_left)]
    np.testing.assert_allclose(y, wanted_y, rtol=2e-5, atol=2e-5 * scales[0])
    np.testing.assert_allclose(left, wanted_left, rtol=2e-5, atol=2e-5 * scales[1])


@pytest.mark.parametrize("pool", POOLS)
@by_problem
def test_chunks_batches_padding_and_threads_change_no_bit(name: str, pool: int) -> None:
    p, lengths = PROBLEMS[name], np.array([1, 64, 150, 97])
    inputs, h = draw(p, 4, 150)
    for x in inputs:
        for i, n in enumerate(lengths):
            x[i, n:] = x[i, n - 1]  # a bucket is padded with its last token
    y, left = run(p, inputs, h, lengths, pool)
    for i, n in enumerate(lengths):
        state, ys, at = h[i : i + 1], [], 0
        for count in (1, 5, 70, 1, 200):
            part = [x[i : i + 1, at : min(at + count, n)] for x in inputs]
            if part[0].shape[1]:
                one, state = run(p, part, state, np.array([part[0].shape[1]]))
                ys.append(one[0])
                at += count
        assert np.array_equal(np.concatenate(ys), y[i, :n]), i
        assert np.array_equal(state[0], left[i]), i


@by_problem
def test_views(name: str) -> None:
    """Inputs may be columns of one matrix, as after a projection."""
    p = PROBLEMS[name]
    inputs, h = draw(p, 2, 30)
    lengths = np.full(2, 30)
    whole = np.full((2, 30, sum(p.widths) + 1), np.nan, np.float32)
    views, at = [], 1
    for x in inputs:
        whole[..., at : at + x.shape[-1]] = x
        views.append(whole[..., at : at + x.shape[-1]])
        at += x.shape[-1]
    for a, b in zip(run(p, inputs, h, lengths), run(p, views, h, lengths), strict=True):
        assert np.array_equal(a, b)


def test_opposite_queries_and_keys_have_a_mean() -> None:
    *inputs, h, wanted = opposites(20)
    y, _ = run(based(2, 3, 4, "hedgehog"), inputs, h, np.array([20]))
    np.testing.assert_allclose(y, wanted, rtol=1e-5, atol=1e-6)


def test_small_features_have_the_floor_of_the_definition() -> None:
    """Features of one key are above the floor and those of two others below it: weights are as in float64."""
    p = based(1, 3, 2, "hedgehog")
    inputs, h = draw(p, 1, 3)
    inputs[0][:] = [38.0, -38.0]
    inputs[1][0] = [[-38.0, 38.0], [-33.0, 33.0], [-42.0, 42.0]]
    for count in (1, 2, 3):
        given = [x[:, :count] for x in inputs]
        (y, _), (wanted, _) = (f(p, given, h, np.array([count])) for f in (run, theirs))
        np.testing.assert_allclose(y, wanted, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("name", ["mamba", "mamba2"])
def test_fast_decays_neither_overflow_nor_divide(name: str) -> None:
    p = PROBLEMS[name]
    inputs, h = draw(p, 1, 200)
    inputs[1] += 20
    for x in run(p, inputs, h, np.array([200])):
        assert np.isfinite(x).all()


@by_problem
def test_one_bad_sequence_affects_no_other(name: str) -> None:
    p = PROBLEMS[name]
    inputs, h = draw(p, 3, 20)
    lengths = np.full(3, 20)
    y, left = run(p, inputs, h, lengths)
    for bad in (np.inf, np.nan):
        inputs[0][1, 7] = bad
        dirty_y, dirty_left = run(p, inputs, h, lengths)
        assert np.array_equal(dirty_y[[0, 2]], y[[0, 2]]) and np.array_equal(dirty_left[[0, 2]], left[[0, 2]])
        assert np.array_equal(dirty_y[1, :7], y[1, :7])
        assert not np.isfinite(dirty_y[1, 7]).all()


def test_bad_arguments_are_errors() -> None:
    p = PROBLEMS["mamba"]
    inputs, h = draw(p, 2, 5)
    with pytest.raises(ValueError, match="length of 6 is not"):
        run(p, inputs, h, np.array([5, 6]))
    with pytest.raises(ValueError, match="required"):
        run(p, inputs, h[:1], np.array([5, 5]))
    with pytest.raises(TypeError):
        run(p, [x.astype(np.float64) for x in inputs], h, np.array([5, 5]))


def fingerprint() -> bytes:
    """Return results that must not depend on the instruction set."""
    outputs = []
    for p in PROBLEMS.values():
        inputs, h = draw(p, 2, 70)
        outputs += [x.ravel() for x in run(p, inputs, h, np.array([70, 70]), 2)]
    return np.concatenate(outputs).tobytes()


@pytest.mark.parametrize("isa", OTHERS)
def test_instruction_sets(isa: str) -> None:
    theirs, mine = (
        np.frombuffer(x, np.float32) for x in (fingerprint_under(isa, "test_kernels_recurrent"), fingerprint())
    )
    if isa == "portable":  # the portable set may round products before they are added
        np.testing.assert_allclose(theirs, mine, rtol=2e-4, atol=2e-4)
    else:
        assert np.array_equal(theirs, mine)
