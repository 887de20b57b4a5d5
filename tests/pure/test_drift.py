"""Drift of a server's steps from what its calibration predicts."""

from __future__ import annotations

import pytest

from ridgeline.serve.engine.drift import FACTOR, WINDOW_S, WINDOWS, Drift


def run(drift: Drift, ratio: float, windows: int, step_s: float = 0.05) -> list[str]:
    """Return the lines of some windows of steps that take `ratio` times their predicted `step_s`."""
    steps = round(windows * WINDOW_S / (ratio * step_s))
    return [line for _ in range(steps + windows) if (line := drift.add(ratio * step_s, step_s))]


def test_a_drift_is_said_once_and_so_is_its_end() -> None:
    drift = Drift()
    assert run(drift, 1.3, 5) == [] and drift.ratio == pytest.approx(1.3)
    assert run(drift, 2.0, WINDOWS - 1) == [], "too short"
    assert run(drift, 1.0, 1) == []
    (line,) = run(drift, 2.0, 3 * WINDOWS)
    assert "steps take 2 times as long as the calibration predicts" in line and "ridgeline calibrate" in line
    (line,) = run(drift, 1.1, 2 * WINDOWS)
    assert line.endswith("predicts again")
    (line,) = run(drift, 0.5, 2 * WINDOWS)
    assert "0.5 times as long" in line


def test_short_steps_are_compared_with_the_first_ones() -> None:
    """The host's work is in them, but not in the prediction."""
    drift, twice = Drift(), 2 * FACTOR
    assert run(drift, twice, 3 * WINDOWS, step_s=1e-3) == []
    assert len(run(drift, twice * FACTOR * 1.1, 2 * WINDOWS, step_s=1e-3)) == 1


def test_no_prediction_is_no_drift() -> None:
    drift = Drift()
    assert [drift.add(10.0, 0.0) for _ in range(9)] == [None] * 9 and drift.ratio == 0
