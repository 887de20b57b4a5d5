"""The matrix unit, emulated in plain C++ in a process of its own: products of bf16, and whole models."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from oracle.build import build
from oracle.families import CASES

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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama", ()),
        pytest.param("llama", ("--activations", "bf16"), marks=pytest.mark.nightly),
        pytest.param("pocket", (), marks=pytest.mark.nightly),
    ],
)
def test_no_setting_changes_a_token_of_a_bf16_model(name: str, options: tuple[str, ...], tmp_path: Path) -> None:
    """`ridgeline verify` compares batches, chunks, pages, preemption and drafts.

    A step of three tokens uses vectors, and one of four the unit.
    """
    model = name
    if name != "pocket":
        build(CASES[name], tmp_path)
        model = str(tmp_path)
    run("-m", "ridgeline", "verify", model, "--quick", "--dtype", "bfloat16", *options)
