"""Run the tests of the kernels once more, in a build that checks memory and undefined behavior."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("ridgeline._kernels", reason="the kernels of csrc/ are not built")
from cpu.instruction_sets import ISAS

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[2]
# Loads the build that the first argument names instead of the installed one, then runs pytest with the other arguments.
RUN = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("ridgeline._kernels", sys.argv[1])
sys.modules[spec.name] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sys.modules[spec.name])
import pytest
sys.exit(pytest.main(sys.argv[2:]))
"""


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not (shutil.which("cmake") and shutil.which("g++") and shutil.which("ninja")):
        pytest.skip("needs cmake, g++ and ninja")
    folder = tmp_path_factory.mktemp("build")
    options = ["-G", "Ninja", "-DRIDGELINE_SANITIZE=ON", f"-DPython_EXECUTABLE={sys.executable}"]
    for command in (["cmake", "-S", str(ROOT), "-B", str(folder), *options], ["cmake", "--build", str(folder), "-j1"]):
        run = subprocess.run(command, capture_output=True, text=True, check=False)
        assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    return next(folder.glob("_kernels*.so"))


@pytest.mark.nightly
@pytest.mark.parametrize(("isa", "unit"), [*((isa, "off") for isa in ISAS), (ISAS[0], "emulated")])
def test_no_access_out_of_bounds_and_nothing_undefined(build: Path, isa: str, unit: str) -> None:
    runtimes = [
        subprocess.run(["g++", f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout.strip()
        for name in ("libasan.so", "libubsan.so")
    ]
    env = {
        **os.environ,
        "LD_PRELOAD": " ".join(runtimes),
        "ASAN_OPTIONS": "detect_leaks=0",  # Python itself keeps much memory until it exits
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
        "RIDGELINE_ISA": isa,
        "RIDGELINE_MATRIX_UNIT": unit,
    }
    files = [str(p) for p in sorted(HERE.glob("test_kernels_*.py")) if p != Path(__file__)]
    left_out = " and ".join(f"not {name}" for name in ("instruction_set", "fork", "one_core", "in_a_process"))
    options = ["-n0", "-x", "-p", "no:cacheprovider", "-k", left_out]
    command = [sys.executable, "-c", RUN, str(build), *files, *options]
    run = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if "has no such instructions" in run.stderr:
        pytest.skip(f"this CPU has no {isa}")
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
