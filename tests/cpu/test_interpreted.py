"""Run tests/interpreted in processes of their own, one for each file, in Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
FOLDER = Path(__file__).parents[1] / "interpreted"


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted(FOLDER.glob("test_*.py")), ids=lambda path: path.stem)
def test_kernels_in_the_interpreter(path: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-p", "no:xdist", "-p", "no:cacheprovider", "-x", str(path)]
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    ran = subprocess.run(command, env=env, cwd=FOLDER.parents[1], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-2000:]
    assert " passed" in ran.stdout
