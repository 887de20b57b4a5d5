"""Kernels under another instruction set, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


def fingerprint_under(isa: str, module: str) -> bytes:
    """What `fingerprint()` of a module of tests gives there. Skips the test where the CPU has no such set."""
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
