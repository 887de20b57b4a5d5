"""Run each test process with one thread: the models are tiny, and busy-waiting threads of two test runs slow each other
down.
"""

import os
import signal
import tempfile

import pytest

os.environ["OMP_NUM_THREADS"] = os.environ.get("RIDGELINE_TEST_THREADS", "1")  # cpu/test_perturbed.py sets more threads
# The tests write their calibrations to a temporary folder, where no user's command finds them.
os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="ridgeline-tests-")


def pytest_configure() -> None:
    """Pin each process of `pytest -n` to one core, and set the signal handlers that a terminal has.

    A shell starts background jobs with SIGINT ignored, and every process that the tests start and interrupt would
    inherit that.
    """
    if worker := os.environ.get("PYTEST_XDIST_WORKER"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[int(worker.removeprefix("gw")) % len(cores)]})
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def short_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure decode in a tenth of a second for each model; reports measure it for two seconds."""
    from ridgeline.measure import rate

    monkeypatch.setattr(rate, "LIMIT_S", 0.1)
