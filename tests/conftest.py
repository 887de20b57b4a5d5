"""One thread per test process: the models are tiny, and spinning threads of two test runs starve each other."""

import os
import signal
import tempfile

os.environ["OMP_NUM_THREADS"] = os.environ.get("RIDGELINE_TEST_THREADS", "1")  # more: cpu/test_perturbed.py
# What tests measure is kept where no user looks for it.
os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="ridgeline-tests-")


def pytest_configure() -> None:
    """One core for each process of `pytest -n`, too, and signals as in a terminal.

    A shell starts background jobs with SIGINT ignored, and so would be all that the tests start and interrupt.
    """
    if worker := os.environ.get("PYTEST_XDIST_WORKER"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[int(worker.removeprefix("gw")) % len(cores)]})
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
