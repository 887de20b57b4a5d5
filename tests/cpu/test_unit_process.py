"""The matrix unit, emulated in plain C++ in a process of its own: products of bf16, and whole models."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("ridgeline._kernels", reason="the kernels of csrc/ are not built")
HERE = Path(__file__).parent


def run(*command: str) -> str:
    """Return the output of a Python command with an emulated unit."""
    path = os.pathsep.join(p for p in sys.path if p)
    env = {**os.environ, "RIDGELINE_MATRIX_UNIT": "emulated", "PYTHONPATH": path}
    done = subprocess.run([sys.executable, *command], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def test_products_of_bf16() -> None:
    said = run("-m", "pytest", str(HERE / "unit_cases.py"), "-q", "-n0", "-p", "no:cacheprovider")
    assert "skipped" not in said


@pytest.mark.parametrize("options", [(), ("--activations", "bf16")], ids=["exact", "bf16"])
def test_no_setting_changes_a_token_of_a_bf16_model(options: tuple[str, ...]) -> None:
    """`ridgeline verify` compares batches, chunks, pages, preemption and drafts; few tokens are multiplied as many."""
    run("-m", "ridgeline", "verify", "pocket", "--quick", "--dtype", "bfloat16", *options)
