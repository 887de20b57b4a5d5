"""bench/add_model.py: an entry is added only if its count agrees with the published one."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from published import PUBLISHED

from ridgeline.catalog.machines import read_data

ROOT = Path(__file__).parents[2]
SMOL = "HuggingFaceTB/SmolLM2-135M"


@pytest.fixture(scope="module")
def bench() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "bench"))
        yield importlib.import_module("add_model")
        sys.modules.pop("add_model", None)


@pytest.mark.parametrize(("count", "published", "agrees"), [
    (14_770_033_664, "14.7B", True), (14_770_033_664, "14.8B", True), (14_770_033_664, "14.9B", False),
    (14_770_033_664, "14770033664", True), (14_770_033_664, "14770033665", False), (134_515_008, "135M", True),
    (134_515_008, "133M", False), (6_738_415_616, "7B", True), (70_553_706_496, "70B", True),
    (58 * 10**9, "70B", False),
    (361_821_120, "360M", True), (405_853_388_800, "405B", True), (407 * 10**9, "405B", False),
])  # fmt: skip
def test_a_count_agrees_as_far_as_its_digits_say(bench: Any, count: int, published: str, agrees: bool) -> None:
    assert bench.agrees(count, published) is agrees


def test_every_entry_agrees_with_its_published_count(bench: Any) -> None:
    entries = read_data("models.json")
    stated = [e for e in entries if "published" in e]
    assert len(entries) >= 150 and len(stated) >= 80
    for e in stated:
        assert bench.agrees(e["params"], e["published"]), e["name"]
        assert "Count: " in e["source"] and ("Config: " in e["source"] or "Sizes: " in e["source"])


def test_the_catalog_is_written_as_it_stands(bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = bench.DATA.read_text(encoding="utf-8")
    monkeypatch.setattr(bench, "DATA", tmp_path / "models.json")
    bench.write(json.loads(before))
    assert (tmp_path / "models.json").read_text(encoding="utf-8") == before


def test_an_entry_is_added_or_refused(
    bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data, config = tmp_path / "models.json", tmp_path / "config.json"
    data.write_text("[]")
    monkeypatch.setattr(bench, "DATA", data)
    monkeypatch.setattr(bench, "transformers_count", lambda config: None)
    config.write_text(json.dumps(PUBLISHED[SMOL][0] | {"_name_or_path": "C:/models/somebody"}))

    def run(*words: str) -> Any:
        monkeypatch.setattr(sys, "argv", ["add_model.py", *words])
        try:
            bench.main()
        except SystemExit as e:
            return e.code
        return 0

    given = ("a/b", "--config", str(config), "--source", "here")
    assert "100M are published" in run(*given, "--published", "100M")
    assert json.loads(data.read_text()) == []
    assert run(*given, "--published", "135M", "--alias", "c") == 0
    (added,) = json.loads(data.read_text())
    assert added["params"] == 134_515_008 and added["aliases"] == ["c"] and "_name_or_path" not in added["config"]
    assert "there is an entry of this name" in run(*given, "--published", "135M")
    assert run("--check") == 0
    data.write_text(data.read_text().replace("134515008", "134515009"))
    assert "1 of 1 entries are wrong" in run("--check")
    assert "the entry says 134,515,009" in capsys.readouterr().out
    monkeypatch.setattr(bench, "transformers_count", lambda config: 1)
    assert "transformers builds 1" in run("other", "--config", str(config), "--source", "s", "--published", "135M")
