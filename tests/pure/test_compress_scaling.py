"""AWQ's scales against the published search, SmoothQuant's against its formula, and the report of outliers."""

from __future__ import annotations

import numpy as np
import pytest

from ridgeline.compress.awq import FINALISTS, channel_scales, kept_columns, output_loss, scaled_rounding, search_scales
from ridgeline.compress.outliers import outlier_columns, outlier_report, small_column_scales
from ridgeline.compress.rtn import round_to_nearest
from ridgeline.compress.smooth import smooth_scales
from ridgeline.load.stored import dequantized
from ridgeline.spec.quant import format_of

FORMAT = format_of("int3-asym")


def problem(outliers: int = 4) -> tuple[np.ndarray, list[np.ndarray]]:
    """Inputs [tokens, in] with a few large channels, and matrices that read them."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((300, 96)).astype(np.float32)
    x[:, :outliers] *= 30
    return x, [rng.standard_normal((rows, 96)).astype(np.float32) for rows in (40, 24)]


def published(x: np.ndarray, weights: list[np.ndarray]) -> tuple[np.ndarray, float, list[float]]:
    """The search of the paper (equations 4 and 5; auto_scale.py), written out: 20 ratios, the error of the output."""
    mean = np.abs(x).mean(0)
    best, best_ratio, losses = np.inf, -1.0, []
    for ratio in (i / 20 for i in range(20)):
        s = np.maximum(mean**ratio, 1e-4)
        s /= np.sqrt(s.max() * s.min())
        loss = 0.0
        for w in weights:
            scaled = w * s
            q = np.empty_like(w)
            for j in range(0, w.shape[1], 32):
                part = scaled[:, j : j + 32]
                low, high = np.minimum(part.min(1, keepdims=True), 0), np.maximum(part.max(1, keepdims=True), 0)
                scale = ((high - low) / 7).astype(np.float16).astype(np.float32)
                zero = np.clip(np.rint(-low / scale), 0, 7)
                q[:, j : j + 32] = (np.clip(np.rint(part / scale) + zero, 0, 7) - zero) * scale
            loss += float(np.square((x / s) @ q.T - x @ w.T).sum()) / len(x)
        losses.append(loss)
        if loss < best:
            best, best_ratio, best_scales = loss, ratio, s
    return best_scales, best_ratio, losses


def test_the_search_is_the_published_one() -> None:
    x, weights = problem()
    scales, ratio, losses = published(x, weights)
    found = search_scales(np.abs(x).mean(0), output_loss(weights, x.T @ x / len(x), FORMAT))
    assert found.exponent == ratio > 0
    np.testing.assert_allclose(found.losses, losses, rtol=2e-3)
    np.testing.assert_allclose(found.scales, scales, rtol=1e-5)
    assert min(losses) < 0.5 * losses[0], "a few large channels are what AWQ is for"


def test_a_search_in_two_steps_finds_the_best_of_all_tokens() -> None:
    """The first tokens choose finalists; the others decide among them, and the sums are those of all tokens."""
    x, weights = problem()
    mean, parts = np.abs(x).mean(0), (x[:60], x[60:])
    first, rest = (output_loss(weights, part.T @ part, FORMAT) for part in parts)
    calls: list[float] = []

    def counted(scales: np.ndarray) -> float:
        calls.append(rest(scales))
        return calls[-1]

    found = search_scales(mean, first, counted)
    whole = search_scales(mean, output_loss(weights, x.T @ x, FORMAT))
    assert len(calls) == FINALISTS and found.exponent == whole.exponent
    assert min(found.losses) == pytest.approx(min(whole.losses), rel=1e-4)
    assert sum(np.isfinite(found.losses)) == FINALISTS


def test_scales_lie_around_one_and_exponent_zero_changes_nothing() -> None:
    mean = np.array([1e-9, 0.1, 1, 50], np.float32)
    np.testing.assert_array_equal(channel_scales(mean, 0), 1)
    found = channel_scales(mean, 0.5)
    assert found.max() * found.min() == pytest.approx(1) and np.all(np.diff(found) > 0)


def test_a_search_without_a_finite_loss_changes_nothing() -> None:
    found = search_scales(np.ones(8, np.float32), lambda scales: float("nan"))
    np.testing.assert_array_equal(found.scales, 1)


def test_planted_mistakes_raise_the_error() -> None:
    """Scales that are applied the wrong way round, and those of other channels, lose more than none."""
    x, weights = problem()
    loss = output_loss(weights, x.T @ x / len(x), FORMAT)
    found = search_scales(np.abs(x).mean(0), loss)
    assert loss(1 / found.scales) > loss(np.ones(96, np.float32)) > 2 * min(found.losses)
    assert loss(np.roll(found.scales, 10)) > loss(np.ones(96, np.float32))


def test_scaling_without_rounding_is_exact() -> None:
    _, weights = problem()
    found = scaled_rounding(weights[0], channel_scales(np.arange(1, 97, dtype=np.float32), 0.7), format_of("int8-32"))
    assert np.abs(found - weights[0]).max() < 0.05 * np.abs(weights[0]).max()


@pytest.mark.parametrize(("share", "count"), [(0.001, 1), (0.01, 1), (0.05, 5)])
def test_the_first_form_keeps_the_columns_with_the_largest_inputs(share: float, count: int) -> None:
    x, weights = problem(5)
    weight, mean = weights[0], np.abs(x).mean(0)
    plain = dequantized(round_to_nearest(weight, FORMAT))
    columns, found = kept_columns(weight, mean, share), plain.copy()
    columns.replace_in(found)
    kept = np.flatnonzero((found != plain).any(0))
    np.testing.assert_array_equal(kept, columns.indices)
    assert set(kept) == set(np.argsort(-mean)[:count])
    np.testing.assert_array_equal(found[:, kept], weight[:, kept].astype(np.float16))
    if count == 5:
        errors = [np.square(x @ (q - weight).T).sum() for q in (found, plain)]
        assert errors[0] < 0.1 * errors[1]


def test_smoothing_follows_its_formula_and_leaves_the_product() -> None:
    x, weights = problem()
    peaks = np.abs(x).max(0)
    x[:, 9] = peaks[9] = 0
    s = smooth_scales(peaks, weights, 0.5)
    largest = np.maximum(np.abs(weights[0]).max(0), np.abs(weights[1]).max(0))
    expected = np.sqrt(peaks / largest)
    expected[9] = 1
    np.testing.assert_allclose(s, expected, rtol=1e-5)
    np.testing.assert_allclose((x / s) @ (weights[0] * s).T, x @ weights[0].T, rtol=1e-3, atol=1e-3)
    # At 1/2, inputs and weights share the difficulty: their largest magnitudes are equal.
    used = np.arange(96) != 9
    np.testing.assert_allclose((peaks / s)[used], (largest * s)[used], rtol=1e-4)


def test_outliers_are_named_with_the_largest_first() -> None:
    peaks = np.array([1, 6, 5.99, 40], np.float32)
    found = outlier_columns(peaks)
    assert found.columns == (3, 1) and found.peaks == (40, 6) and found.share == 0.5
    assert outlier_report({"a": peaks, "b": peaks[:1]}) == {"a": found}
    assert found.to_json() == {"columns": [3, 1], "peaks": [40.0, 6.0], "share": 0.5}


def test_small_columns_of_outliers_get_a_scale_and_no_others() -> None:
    """A column that is 50 times too small is scaled by 32, or 64 where it was larger than most, and never without."""
    rng = np.random.default_rng(0)
    weights = [rng.standard_normal((rows, 96)).astype(np.float32) for rows in (64, 32)]
    peaks = np.full(96, 5.0, np.float32)
    np.testing.assert_array_equal(small_column_scales(peaks, weights), 1)
    peaks[[3, 7, 50]] = 100
    np.testing.assert_array_equal(small_column_scales(peaks, weights), 1)  # these columns are as large as others
    for weight in weights:
        weight[:, [3, 50, 60]] /= 50  # 60 has no outliers
    weights[0][:, 90] = weights[1][:, 90] = 0
    peaks[90] = 100
    found = small_column_scales(peaks, weights)
    assert set(found[[3, 50]]) <= {32.0, 64.0}
    np.testing.assert_array_equal(np.delete(found, [3, 50]), 1)
