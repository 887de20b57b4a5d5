"""Compare what describes the package to others: pyproject.toml, CITATION.cff and the version of the module."""

from __future__ import annotations

import tomllib
from pathlib import Path

import yaml

import ridgeline

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_the_citation_describes_the_package() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["cff-version"] == "1.2.0"
    assert citation["title"].lower() == PROJECT["name"]
    assert citation["abstract"] == PROJECT["description"]
    assert citation["keywords"] == PROJECT["keywords"]
    assert citation["version"] == PROJECT["version"] == ridgeline.__version__
    assert PROJECT["license"].startswith(citation["license"])
    assert {"message", "authors", "type"} <= citation.keys()


def test_the_version_has_a_release_note() -> None:
    assert f"\n## {ridgeline.__version__}\n" in (ROOT / "docs/releases.md").read_text(encoding="utf-8")
