"""Parameter counts of the catalog's models against those of the models that transformers builds from their configs."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from ridgeline.catalog.machines import read_data

ENTRIES = [e for e in read_data("models.json") if "published" in e]


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("entry", ENTRIES, ids=lambda e: e["name"])
def test_transformers_builds_as_many(entry: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "bench"))
    assert importlib.import_module("add_model").problem_of(entry) is None
