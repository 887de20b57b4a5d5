"""bench/page_pictures.py writes a picture only if the prediction is close to the measurement."""

from __future__ import annotations

import contextlib
import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Return the script with a fake server, load and Chromium, on a calibrated machine."""
    monkeypatch.syspath_prepend(str(BENCH))
    before = set(sys.modules)
    found = importlib.import_module("page_pictures")
    for name in ("serving", "steady_load"):
        monkeypatch.setattr(found, name, lambda *given: contextlib.nullcontext(8000))
    monkeypatch.setattr(found, "load_calibration", lambda: "a calibration")
    monkeypatch.setattr(found.shutil, "which", lambda name: name)
    monkeypatch.setattr(sys, "argv", ["page_pictures.py", "--out", str(tmp_path)])
    yield found
    for name in {"common", "page_pictures"} - before:
        sys.modules.pop(name, None)


def test_two_pictures_are_written(script: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(script, "take", lambda browser, port, theme, streams: (theme.encode(), 1.1, 0.9))
    script.main()
    written = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert written == {"page-live-dark.png": b"dark", "page-live-light.png": b"light"}


def test_none_is_written_if_one_is_far_from_its_prediction(
    script: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    taken = {"dark": (b"dark", 1.1, 0.9), "light": (None, 11.86, None)}
    monkeypatch.setattr(script, "take", lambda browser, port, theme, streams: taken[theme])
    with pytest.raises(SystemExit, match=r"a step takes 11\.86 times what was predicted"):
        script.main()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("ratio", "near"), [(0.69, False), (0.71, True), (1.29, True), (1.31, False), (float("nan"), False)]
)
def test_the_ratios_that_agree(script: Any, ratio: float, near: bool) -> None:
    assert script.agrees(ratio) == near


def test_it_asks_for_a_calibration(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script, "load_calibration", lambda: None)
    with pytest.raises(SystemExit, match="ridgeline calibrate"):
        script.main()
