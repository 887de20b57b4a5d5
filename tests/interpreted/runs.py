"""Run the tests of this folder in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

FOLDER = Path(__file__).parent
FILES = sorted(FOLDER.glob("test_*.py"))
PARTS = [FILES[first::2] for first in range(2)]  # to import torch and triton takes seconds for each process


def run(files: Sequence[Path], *, interpret: bool, marks: str) -> None:
    """Run the tests of some files with these marks in Triton's interpreter, or on a GPU.

    Raises AssertionError if a test fails or none runs.
    """
    options = ["-p", "no:xdist", "-p", "no:cacheprovider", "-x", "-m", marks]
    command = [sys.executable, "-m", "pytest", *options, *map(str, files)]
    env = {**os.environ, "TRITON_INTERPRET": "1" if interpret else "0"}
    ran = subprocess.run(command, env=env, cwd=FOLDER.parents[1], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-2000:]
    assert " passed" in ran.stdout
