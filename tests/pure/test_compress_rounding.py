"""Rounding to nearest, its observers, and clipped ranges, against definitions written out in float64."""

from __future__ import annotations

import numpy as np
import pytest

from ridgeline.compress.clip import clip_by_importance, clip_by_output
from ridgeline.compress.rtn import OBSERVERS, round_to_nearest
from ridgeline.load.stored import dequantized
from ridgeline.spec.quant import NUMBERS, Format, format_of

SIZES = [(1, 1), (5, 63), (33, 100)]
NAMES = [
    "int8", "int8-tensor", "int8-asym", "int6", "int5-asym", "int4", "int4-128-asym", "int3-asym", "int3-row", "int2",
    "int2-asym", "int8-16x32", "fp8", "fp8-tensor", "fp8-row", "fp8-128x128", "fp8-16x48", "nf4", "fp4", "iq4",
]  # fmt: skip


def matrix(rows: int, columns: int, seed: int = 0) -> np.ndarray:
    """Weights with a few large ones, as models have them."""
    rng = np.random.default_rng(seed)
    return (rng.standard_normal((rows, columns)) * rng.lognormal(size=columns)).astype(np.float32)


def blocks(format: Format, shape: tuple[int, int]):
    height, width = format.rows or shape[0], format.group or shape[1]
    for i in range(0, shape[0], height):
        for j in range(0, shape[1], width):
            yield slice(i, i + height), slice(j, j + width)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", SIZES)
def test_every_number_is_the_nearest_one(name: str, shape: tuple[int, int]) -> None:
    format, weight = format_of(name), matrix(*shape)
    found = round_to_nearest(weight, format)
    numbers, result = NUMBERS[format.numbers], dequantized(found)
    assert np.all(found.scales > 0)
    for rows, columns in blocks(format, shape):
        group = columns.start // (format.group or shape[1])
        scale = np.float64(found.scales[rows.start, group])
        assert np.all(found.scales[rows, group] == scale), "one block has one scale"
        zero = 0 if found.zero_points is None else int(found.zero_points[rows.start, group])
        held = (
            np.array(numbers.levels)
            if numbers.levels
            else np.arange(numbers.low + (name[:4] == "int8" and not zero), numbers.high + 1) - zero
        )
        every = held[np.isfinite(held)] * scale
        off = np.abs(weight[rows, columns].astype(np.float64)[..., None] - every).min(-1)
        assert np.abs(np.abs(result[rows, columns] - weight[rows, columns]) - off).max() <= 1e-6 * abs(every).max()


@pytest.mark.parametrize("name", ["int4-asym", "int3-asym", "int2-asym", "int8-asym", "int4-128-asym"])
def test_zero_points_halve_the_step_of_one_sided_groups(name: str) -> None:
    weight = np.abs(matrix(8, 96))
    with_zeros = round_to_nearest(weight, format_of(name))
    off = [np.abs(dequantized(round_to_nearest(weight, format_of(n))) - weight).mean() for n in (name, name[:-5])]
    assert off[0] < 0.65 * off[1]
    assert np.all(with_zeros.zero_points == NUMBERS[with_zeros.format.numbers].low)
    assert np.all(dequantized(round_to_nearest(0 * weight, format_of(name))) == 0)


@pytest.mark.parametrize("name", ["int4", "int3-asym", "fp8-row", "int8", "int8-tensor"])
def test_mse_is_never_worse_than_min_max(name: str) -> None:
    format, weight = format_of(name), matrix(20, 100)
    off = {o: np.square(dequantized(round_to_nearest(weight, format, o)) - weight).sum() for o in OBSERVERS}
    assert off["mse"] <= off["min-max"]
    assert off["mse"] <= off["percentile"] * 1.02


def test_the_percentile_observer_clips_what_lies_outside() -> None:
    weight = matrix(1, 4096)
    weight[0, 7] = 1000
    found = dequantized(round_to_nearest(weight, format_of("int8-row-asym"), "percentile"))
    assert found[0, 7] < 500
    kept = np.arange(4096) != 7
    exact = round_to_nearest(weight, format_of("int8-row-asym"))
    assert np.square(found - weight)[0, kept].sum() < np.square(dequantized(exact) - weight)[0, kept].sum()


@pytest.mark.parametrize("name", ["int4", "int4-asym", "int3-asym", "int2-asym", "fp8-row", "int8"])
def test_clipping_lowers_what_it_is_chosen_by(name: str) -> None:
    format, weight, rng = format_of(name), matrix(24, 96), np.random.default_rng(1)
    x = (rng.standard_normal((400, 96)) * rng.lognormal(size=96)).astype(np.float32)
    x[:, 1] = x[:, 0] + 0.1 * x[:, 1]  # columns that depend on each other, which an importance cannot say
    hessian = x.T @ x / len(x)

    def errors(result: np.ndarray) -> tuple[float, float]:
        off = (result - weight).astype(np.float64)
        groups = [slice(j, j + (format.group or 96)) for j in range(0, 96, format.group or 96)]
        by_output = sum(np.square(x[:, g] @ off[:, g].T).sum() for g in groups) / len(x)
        return float((np.square(off) * np.diag(hessian)).sum()), float(by_output)

    plain = errors(dequantized(round_to_nearest(weight, format)))
    importance = errors(dequantized(clip_by_importance(weight, np.diag(hessian), format)))
    output = errors(dequantized(clip_by_output(weight, hessian, format)))
    assert importance[0] < plain[0] and output[1] < plain[1]
    assert output[1] < 1.02 * importance[1]
    assert importance[0] < 1.02 * output[0], "neither search is exhaustive"


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 3e38])
def test_a_weight_that_no_scale_can_hold_is_refused(bad: float) -> None:
    weight = matrix(4, 64)
    weight[2, 40] = bad
    with np.errstate(all="ignore"), pytest.raises(ValueError, match="not finite"):
        round_to_nearest(weight, format_of("int4"))
