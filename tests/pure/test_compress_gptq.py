"""GPTQ against closed forms, a search over all codes, and bugs that were planted on purpose."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from ridgeline.compress import gptq as module
from ridgeline.compress import rows
from ridgeline.compress.clip import clip_by_output
from ridgeline.compress.gptq import GPTQ, feedback_of, gptq, inverse_factor, inverse_lower
from ridgeline.compress.rtn import round_to_nearest
from ridgeline.load.stored import dequantized
from ridgeline.spec.quant import format_of

OPTIONS = [GPTQ(order, clip, static) for order, clip, static in product((False, True), repeat=3)]
NAMES = ["int8", "int4", "int4-asym", "int3-asym", "int2-asym", "int3-128", "fp8-row", "fp8-16x32", "nf4", "int4-200"]


def problem(rows: int = 24, columns: int = 96, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Weights, and inputs that depend on each other."""
    rng = np.random.default_rng(seed)
    mix = rng.standard_normal((columns, columns)) * rng.lognormal(sigma=1.0, size=columns)
    x = rng.standard_normal((4 * columns, columns)) @ mix
    return rng.standard_normal((rows, columns)).astype(np.float32), x


def lost(weight: np.ndarray, result: np.ndarray, hessian: np.ndarray) -> float:
    off = (result - weight).astype(np.float64)
    return float(((off @ hessian) * off).sum())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_inputs_that_are_independent_give_rounding_to_nearest(name: str, options: GPTQ) -> None:
    """With a Hessian that is a multiple of 1, no column can make up for another one."""
    weight, _ = problem(8, 250)
    found = gptq(weight, 3.0 * np.eye(250), format_of(name), options)
    if not options.clip:
        expected = dequantized(round_to_nearest(weight, format_of(name)))
        np.testing.assert_allclose(dequantized(found), expected, atol=1e-6)
    else:
        expected = dequantized(round_to_nearest(weight, format_of(name), "mse"))
        np.testing.assert_allclose(dequantized(found), expected, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_it_loses_less_than_rounding_to_nearest(name: str, options: GPTQ) -> None:
    weight, x = problem()
    hessian = x.T @ x / len(x)
    plain = lost(weight, dequantized(round_to_nearest(weight, format_of(name))), hessian)
    assert lost(weight, dequantized(gptq(weight, hessian, format_of(name), options)), hessian) < 0.9 * plain


def test_the_factor_is_the_upper_one_of_the_inverse() -> None:
    _, x = problem()
    hessian = x.T @ x / len(x)
    factor = inverse_factor(hessian, 0.01).astype(np.float64)
    damped = hessian + 0.01 * np.diag(hessian).mean() * np.eye(96)
    assert np.all(np.tril(factor, -1) == 0) and np.all(np.diag(factor) > 0)
    np.testing.assert_allclose(factor.T @ factor @ damped, np.eye(96), atol=2e-3)


def test_its_result_follows_the_published_loop() -> None:
    """Column by column, with the inverse Hessian made smaller by elimination (equations 2 and 3 of the paper)."""
    weight, x = problem(16, 64)
    hessian = x.T @ x / len(x)
    scale = round_to_nearest(weight, format_of("int4-row-exact")).scales.astype(np.float64)
    left = weight.astype(np.float64)
    inverse = np.linalg.inv(hessian + 0.01 * np.diag(hessian).mean() * np.eye(64))
    expected = np.empty_like(left)
    for i in range(64):
        expected[:, i] = np.clip(np.rint(left[:, i] / scale[:, 0]), -8, 7) * scale[:, 0]
        error = (left[:, i] - expected[:, i]) / inverse[i, i]
        left -= np.outer(error, inverse[i])
        inverse = inverse - np.outer(inverse[:, i], inverse[i]) / inverse[i, i]
    found = dequantized(gptq(weight, hessian, format_of("int4-row-exact"), GPTQ(act_order=False)))
    assert np.mean(np.abs(found - expected) < 1e-4) > 0.995, "all but ties, which float32 may round otherwise"
    assert lost(weight, found, hessian) == pytest.approx(lost(weight, expected, hessian), rel=0.01)


def test_it_lies_between_the_best_of_all_codes_and_rounding_to_nearest() -> None:
    rng = np.random.default_rng(4)
    ratios = []
    for _ in range(20):
        weight, x = rng.standard_normal((1, 5)).astype(np.float32), rng.standard_normal((40, 5))
        x[:, 1:] += 2 * x[:, :1]
        hessian, format = x.T @ x / len(x), format_of("int2-row-asym")
        plain = round_to_nearest(weight, format)
        scale, zero = float(plain.scales[0, 0]), int(plain.zero_points[0, 0])
        every = (np.array(list(product(range(-2, 2), repeat=5))) - zero) * scale
        off = every - weight
        best = float(np.einsum("ni,ij,nj->n", off, hessian, off).min())
        found = lost(weight, dequantized(gptq(weight, hessian, format)), hessian)
        assert found >= best * (1 - 1e-5)
        ratios.append((found - best) / (lost(weight, dequantized(plain), hessian) - best + 1e-12))
    assert np.median(ratios) < 0.5


@pytest.mark.parametrize("static", [False, True])
def test_groups_follow_the_order_of_rounding_or_stay(static: bool) -> None:
    weight, x = problem()
    hessian = x.T @ x / len(x)
    found = gptq(weight, hessian, format_of("int4-asym"), GPTQ(act_order=True, static=static))
    if static:
        assert found.permutation is None
        plain = round_to_nearest(weight, format_of("int4-asym"))
        np.testing.assert_array_equal(found.scales, plain.scales)
    else:
        np.testing.assert_array_equal(found.permutation, np.argsort(-np.diag(hessian), kind="stable"))


def test_clipping_lowers_the_loss_most_at_two_bits() -> None:
    weight, x = problem(16, 96)
    hessian = x.T @ x / len(x)
    for name in ("int2-asym", "int3-asym"):
        losses = [lost(weight, dequantized(gptq(weight, hessian, format_of(name), o)), hessian) for o in
                  (GPTQ(), GPTQ(clip=True))]  # fmt: skip
        assert losses[1] < losses[0]


def test_an_input_that_is_always_zero_keeps_its_weights() -> None:
    weight, x = problem()
    x[:, 5] = 0
    found = dequantized(gptq(weight, x.T @ x / len(x), format_of("int8"), GPTQ()))
    assert np.abs(found - weight)[:, 5].max() <= np.abs(weight).max() / 127
    everything = dequantized(gptq(weight, np.zeros((96, 96)), format_of("int8"), GPTQ()))
    np.testing.assert_allclose(everything, dequantized(round_to_nearest(weight, format_of("int8"))), atol=1e-6)


def plant_no_feedback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "inverse_factor", lambda h, damping: np.eye(len(h), dtype=np.float32))


def plant_factor_of_the_hessian(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "inverse_factor", lambda h, d: np.linalg.cholesky(h).T.astype(np.float32))


def plant_ignored_data(monkeypatch: pytest.MonkeyPatch) -> None:
    real = inverse_factor
    monkeypatch.setattr(module, "inverse_factor", lambda h, damping: real(np.eye(len(h)), damping))


def plant_inputs_of_another_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    real = inverse_factor
    monkeypatch.setattr(module, "inverse_factor", lambda h, damping: real(np.roll(h, (7, 7), (0, 1)), damping))


@pytest.mark.parametrize(
    "plant", [plant_no_feedback, plant_factor_of_the_hessian, plant_ignored_data, plant_inputs_of_another_matrix]
)
def test_planted_bugs_are_seen(plant, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of these would still give a matrix of valid codes: only the loss says that something is wrong."""
    weight, x = problem()
    hessian, format = x.T @ x / len(x), format_of("int4-asym")
    good = lost(weight, dequantized(gptq(weight, hessian, format)), hessian)
    plant(monkeypatch)
    assert lost(weight, dequantized(gptq(weight, hessian, format)), hessian) > 1.5 * good


@pytest.mark.parametrize("name", ["int4-asym", "int3", "int4-row", "int8-16x32"])
@pytest.mark.parametrize("order", [False, True])
def test_parts_of_rows_and_threads_change_nothing(name: str, order: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows do not depend on each other, so that parts of 7 rows on 3 threads have the codes of all rows at once."""
    weight, x = problem(30)
    hessian, options = x.T @ x / len(x), GPTQ(act_order=order, clip=True)
    whole = gptq(weight, hessian, format_of(name), options)
    clipped = clip_by_output(weight, hessian, format_of(name))
    monkeypatch.setattr(rows, "ROWS", 7)
    parted = gptq(weight, feedback_of(hessian, options), format_of(name), options, threads=3)
    for a, b in ((whole, parted), (clipped, clip_by_output(weight, hessian, format_of(name), threads=3))):
        np.testing.assert_array_equal(a.codes, b.codes)
        np.testing.assert_array_equal(a.scales, b.scales)
        assert (a.permutation is None) == (b.permutation is None)


@pytest.mark.parametrize("size", [1, 100, 128, 129, 300, 777])
def test_the_inverse_of_a_triangle(size: int) -> None:
    rng = np.random.default_rng(size)
    lower = np.tril(rng.standard_normal((size, size))) / size + np.eye(size)
    found = inverse_lower(lower)
    np.testing.assert_allclose(found @ lower, np.eye(size), atol=1e-9)
    assert np.all(np.triu(found, 1) == 0)
