"""Compare what describes the package to others: pyproject.toml, CITATION.cff and the version of the module."""

from __future__ import annotations

import importlib.util
import re
import tomllib
from pathlib import Path

import yaml

import ridgeline

ROOT = Path(__file__).parents[2]
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT = SETTINGS["project"]


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


def test_wheels_are_built_for_each_python_that_the_package_takes() -> None:
    """3.11 has a wheel of its own. The others share one with the stable ABI, which the least of them builds."""
    least, most = (int(part) for part in re.findall(r"3\.(\d+)", PROJECT["requires-python"]))
    taken = [f"cp3{minor}" for minor in range(least, most)]
    assert SETTINGS["tool"]["cibuildwheel"]["build"] == [f"{name}-*" for name in taken]
    assert SETTINGS["tool"]["scikit-build"]["wheel"]["py-api"] == taken[1]
    named = [one for one in PROJECT["classifiers"] if one.startswith("Programming Language :: Python :: 3.")]
    assert [f"cp3{one.rpartition('.')[2]}" for one in named] == taken


def test_the_workflows_run_the_daily_check_and_build_wheels() -> None:
    check, wheels = (
        yaml.safe_load((ROOT / f".github/workflows/{name}.yaml").read_text(encoding="utf-8"))["jobs"]
        for name in ("check", "wheels")
    )
    assert {"run": ".ci/run"} in check["check"]["steps"]
    platforms = wheels["wheels"]["strategy"]["matrix"]["os"]
    assert [re.sub(r"-[\d.]+", "", name) for name in platforms] == ["ubuntu", "ubuntu-arm", "macos", "windows"]
    assert any("cibuildwheel" in step.get("uses", "") for step in wheels["wheels"]["steps"])


def test_zig_knows_each_processor_that_the_kernels_of_arm_are_compiled_for() -> None:
    at = importlib.util.spec_from_file_location("wheels", ROOT / ".ci/wheels.py")
    assert at is not None and at.loader is not None
    at.loader.exec_module(wheels := importlib.util.module_from_spec(at))
    named = re.findall(r"-march=arm\S+(?=\))", (ROOT / "CMakeLists.txt").read_text(encoding="utf-8"))
    assert sorted(named) == sorted(wheels.FEATURES)
    images = SETTINGS["tool"]["cibuildwheel"]
    assert {images[f"manylinux-{machine}-image"] for machine in wheels.MACHINES} == {"manylinux2014"}  # glibc 2.17
    assert wheels.PLATFORM == "manylinux_2_17"
