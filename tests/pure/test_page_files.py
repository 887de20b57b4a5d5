"""The page's libraries are the published files, unchanged, with their licenses."""

from __future__ import annotations

import hashlib
import json
import re
import tomllib
from pathlib import Path

import yaml
from packaging.licenses import canonicalize_license_expression

ROOT = Path(__file__).parents[2]
VENDOR = ROOT / "src" / "ridgeline" / "serve" / "http" / "static" / "vendor"
PACKAGES = json.loads((VENDOR / "packages.json").read_text(encoding="utf-8"))
MOST_BYTES = 200_000  # a bound that keeps the wheel small


def test_every_file_is_listed_with_its_checksum() -> None:
    listed = {f"{name}/{file}": sha for name, about in PACKAGES.items() for file, sha in about["files"].items()}
    found = [path for path in VENDOR.rglob("*") if path.is_file() and path.parent != VENDOR]
    hashes = {path.relative_to(VENDOR).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in found}
    assert hashes == listed
    assert sum(path.stat().st_size for path in found) <= MOST_BYTES


def test_the_files_are_of_the_versions_that_are_named() -> None:
    for name, about in PACKAGES.items():
        (script,) = (file for file in about["files"] if file != "LICENSE")
        head = (VENDOR / name / script).read_text(encoding="utf-8")[:400]
        said = re.search(r"v?(\d+\.\d+\.\d+)", head)
        assert said and said[1] == about["version"] and about["source"].endswith(f"/{name}-{about['version']}.tgz")
        assert about["integrity"].startswith("sha512-")


def read_header(path: Path) -> dict[str, str]:
    """Return the fields of a model card."""
    fields: dict[str, str] = yaml.safe_load(path.read_text(encoding="utf-8").split("---")[1])
    return fields


def test_the_licenses_are_shipped() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert canonicalize_license_expression(project["license"]) == project["license"]
    models = {read_header(path)["license_name"].upper() for path in ROOT.glob("src/ridgeline/models/*/README.md")}
    named = set(project["license"].split(" AND "))
    assert models <= named and all(named & set(about["license"].split(" OR ")) for about in PACKAGES.values())
    matched = {path for pattern in project["license-files"] for path in ROOT.glob(pattern)}
    assert matched == {ROOT / "LICENSE", ROOT / "src/ridgeline/models/LICENSE"} | {
        VENDOR / n / "LICENSE" for n in PACKAGES
    }
    assert "MarkedJS" in (VENDOR / "marked" / "LICENSE").read_text(encoding="utf-8")
    readme = (VENDOR / "README.md").read_text(encoding="utf-8").lower()
    assert all(f"[{name}]" in readme for name in PACKAGES)
