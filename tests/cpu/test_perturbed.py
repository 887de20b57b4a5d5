"""Run the numerically sensitive tests on other code paths of torch, its libraries and our kernels, as on other CPUs.

Each setting is a separate process, because the libraries read their environment once. If an instruction set is
disabled, a CPU uses the next best. If a setting fails, run the test that it names with one variable at a time.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Tests that compare floats which torch or our kernels computed, or tokens that such floats decide.
SENSITIVE = (
    "tests/cpu/test_engine.py", "tests/oracle/test_oracle.py", "tests/cpu/test_gradients.py",
    "tests/cpu/test_families.py", "tests/cpu/test_verify.py", "tests/cpu/test_hybrids.py", "tests/cpu/test_drafts.py",
    "tests/cpu/test_beams.py", "tests/cpu/test_engine_beams.py", "tests/cpu/test_swap.py", "tests/cpu/test_kv_cache.py",
    "tests/cpu/test_primitives.py", "tests/cpu/test_delta.py", "tests/cpu/test_recurrent.py",
    "tests/cpu/test_state_spaces.py", "tests/cpu/test_latent.py", "tests/cpu/test_paged.py", "tests/cpu/test_host.py",
    "tests/cpu/test_host_recurrent.py",
)  # fmt: skip
# Each library has its own variable and takes no notice of the others', so one run alters all of them at once.
SETTINGS: dict[str, dict[str, str]] = {
    "oldest, one thread": {
        "ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41", "MKL_CBWR": "COMPATIBLE",
        "RIDGELINE_ISA": "portable",
    },
    "AVX2, two threads": {
        "ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_CBWR": "AVX2", "RIDGELINE_ISA": "avx2",
        "RIDGELINE_TEST_THREADS": "2", "MKL_NUM_THREADS": "2",
    },
    "AVX-512, two threads": {
        "ONEDNN_MAX_CPU_ISA": "AVX512_CORE", "MKL_CBWR": "AVX512", "RIDGELINE_TEST_THREADS": "2",
        "MKL_NUM_THREADS": "2",
    },
}  # fmt: skip


@pytest.mark.nightly
@pytest.mark.parametrize("name", SETTINGS)
def test_sensitive_tests_pass_under_other_settings(name: str) -> None:
    env = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")} | SETTINGS[name]
    command = [sys.executable, "-m", "pytest", *SENSITIVE, "-p", "no:cacheprovider", "--maxfail", "20"]
    run = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    if "this CPU has no such" in run.stdout + run.stderr:
        pytest.skip(f"this CPU has no {SETTINGS[name]}")
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]
