"""The short measurement of decode: it counts tokens as a clock does, and says when it was disturbed or shortened."""

from __future__ import annotations

from typing import Any

import pytest

from ridgeline.errors import DeviceError
from ridgeline.measure import rate as module
from ridgeline.measure.rate import Rate, measure_rate, rate_notes


def test_a_rate_is_the_inverse_of_the_time_of_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []

    def timed(llm: Any, seed: int, prompt: int, answer: int) -> tuple[float, float]:
        asked.append((prompt, answer))
        return prompt * 1e-6, 2e-3

    monkeypatch.setattr(module, "_timed", timed)
    found = measure_rate("pocket", 300, 100, 1)
    assert found is not None and found.tokens_per_s == pytest.approx(500) and found.context == 400
    assert asked[2] == (300, 100) and 0 <= found.others <= 1


def test_a_slow_model_is_measured_in_a_short_context(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_timed", lambda llm, seed, prompt, answer: (prompt * 0.01, 0.1))
    found = measure_rate("pocket", 300, 100, 1)
    assert found is not None and found.context == 100 + 5  # a second of prompt, half a second of answer
    assert "in a context of 105 tokens instead of 400" in rate_notes({"pocket": found}, 400)[0]


def test_a_real_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    found = measure_rate("pocket", 8, 4, 1)
    assert found is not None and found.tokens_per_s > 1 and found.context == 12


def test_remarks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert rate_notes({"a": Rate(10.0, 40, 0.02)}, 40) == ()
    assert "other programs used 60% of the machine" in rate_notes({"a": Rate(10.0, 40, 0.6)}, 40)[0]

    def refuse(*given: Any, **more: Any) -> Any:
        raise DeviceError("no memory")

    monkeypatch.setattr(module, "LLM", refuse)
    assert measure_rate("pocket", 8, 4, 1) is None
    assert rate_notes({"a": None}, 40) == ("a was not measured, because it does not fit into memory",)
