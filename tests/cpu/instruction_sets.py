"""Run kernels with another instruction set, in a separate process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ridgeline._kernels import isas

ISAS = isas()  # best first
OTHERS = ISAS[1:]


def fingerprint_under(isa: str, module: str) -> bytes:
    """Return what `fingerprint()` of a test module returns with another instruction set. Skips the test if the CPU
    lacks the set.
    """
    code = (
        f"import sys; sys.path[:0] = {sys.path!r}; from tests.cpu import {module} as t;"
        "sys.stdout.buffer.write(t.fingerprint())"
    )
    env = {**os.environ, "RIDGELINE_ISA": isa}
    run = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, cwd=Path(__file__).parents[2])
    if b"this CPU has no such" in run.stderr:
        pytest.skip(f"no {isa} here")
    assert run.returncode == 0, run.stderr.decode()
    return run.stdout
