"""The threads of the kernels: any number of them, several callers, after a fork, on one core."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

kernels = pytest.importorskip("ridgeline._kernels", reason="the kernels of csrc/ are not built")

X = np.random.default_rng(0).normal(size=(9, 130)).astype(np.float32)
WEIGHT = np.random.default_rng(1).normal(size=(200, 130)).astype(np.float32)


def product(pool: Any) -> np.ndarray:
    out = np.full((9, 200), np.nan, np.float32)
    w = kernels.Matrix(pool, [WEIGHT], "float32", "fp32", 0, [None], False)
    for tokens in (9, 1):
        kernels.Projection(pool, w, None, 1.0, 1.0, 0.0)(X[:tokens], None, None, None, out[:tokens])
    return out


@pytest.fixture(scope="module")
def wanted() -> np.ndarray:
    return product(kernels.Pool(1))


@pytest.mark.parametrize("threads", [1, 2, 3, 4, 17])
def test_more_threads_than_cores_are_right(threads: int, wanted: np.ndarray) -> None:
    pool = kernels.Pool(threads)
    assert pool.size == threads
    for _ in range(20):
        assert np.array_equal(product(pool), wanted)


def heads(pool: Any, w: Any) -> np.ndarray:
    """Return normalized and rotated heads: a second normalization and rotation of a head changes it."""
    out, turn = np.full((1, w.rows), np.nan, np.float32), np.linspace(0.1, 1.5, 16, dtype=np.float32)[None]
    norm = kernels.Norm("rms", 1e-5, np.linspace(0.5, 2, 32, dtype=np.float32), None)
    run = kernels.Heads(pool, w, None, 1.0, 32, 32, False, False, [norm], 1)
    run(X[:1], None, None, np.cos(turn), np.sin(turn), [out])
    return out


@pytest.mark.parametrize("threads", [2, 5])
def test_heads_that_a_thread_takes_from_another_are_finished_once(threads: int) -> None:
    """Threads without a core of their own begin late, so that others take heads of their ranges."""
    weight = np.random.default_rng(2).normal(size=(32 * 300, 130)).astype(np.float32)
    one, pool = kernels.Pool(1), kernels.Pool(threads)
    wanted = heads(one, kernels.Matrix(one, [weight], "float32", "fp32", 0, [None], False))
    w = kernels.Matrix(pool, [weight], "float32", "fp32", 0, [None], False)
    for _ in range(60):
        assert np.array_equal(heads(pool, w), wanted)


@pytest.mark.parametrize("threads", [0, -1, 1025])
def test_numbers_of_threads_that_cannot_be(threads: int) -> None:
    with pytest.raises(ValueError, match=f"threads must be 1..1024, not {threads}"):
        kernels.Pool(threads)


def test_pools_are_made_and_freed() -> None:
    for _ in range(30):
        kernels.Pool(3)


@pytest.mark.parametrize("shared", [True, False])
def test_several_callers(shared: bool, wanted: np.ndarray) -> None:
    """Two engines in one process share a pool, or have one each."""
    pools = [kernels.Pool(3)] * 4 if shared else [kernels.Pool(3) for _ in range(4)]
    right: list[bool] = []

    def work(pool: Any) -> None:
        right.extend(np.array_equal(product(pool), wanted) for _ in range(25))

    threads = [threading.Thread(target=work, args=(pool,)) for pool in pools]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert right == [True] * 100


def in_child(work: Any) -> int:
    """Return the exit code of a forked process that runs `work`; it is killed after a minute."""
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        os._exit(0 if work() else 1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_fork_makes_threads_of_its_own(wanted: np.ndarray) -> None:
    """A fork works at rest, a second time, and while another thread works; the parent continues, and a pool may also
    just end.
    """
    pool = kernels.Pool(3)
    product(pool)
    assert in_child(lambda: np.array_equal(product(pool), wanted)) == 0
    assert in_child(lambda: in_child(lambda: np.array_equal(product(pool), wanted)) == 0) == 0
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            product(pool)

    busy = threading.Thread(target=work)
    busy.start()
    codes = [in_child(lambda: np.array_equal(product(pool), wanted)) for _ in range(5)]
    stop.set()
    busy.join()
    assert codes == [0] * 5
    assert np.array_equal(product(pool), wanted)
    dropped = [kernels.Pool(3)]
    product(dropped[0])
    assert in_child(lambda: dropped.clear() is None) == 0


def test_a_caller_keeps_its_cores() -> None:
    """Threads that are started from this one inherit its mask, so a pool must not change it."""
    before = os.sched_getaffinity(0)
    for threads in (1, 2, kernels.usable_cores()):
        product(kernels.Pool(threads))
    assert os.sched_getaffinity(0) == before


def threads() -> set[str]:
    return {path.name for path in Path("/proc/self/task").iterdir()}


def looks(ids: set[str]) -> list[list[str]]:
    """Return the state of each thread, and how often it went to sleep."""
    texts = [Path(f"/proc/self/task/{one}/status").read_text() for one in sorted(ids)]
    return [re.findall(r"^(?:State|voluntary_ctxt_switches):\s+(\S+)", text, re.M) for text in texts]


def test_idle_threads_sleep() -> None:
    """After a while all threads sleep, and nothing wakes them."""
    before, pool = threads(), kernels.Pool(4)
    product(pool)
    workers, end = threads() - before, time.monotonic() + 60
    assert workers
    while {state for state, _ in looks(workers)} != {"S"}:
        assert time.monotonic() < end, looks(workers)
        time.sleep(0.001)
    found = looks(workers)
    time.sleep(0.1)  # a timer would wake a thread within this time
    assert looks(workers) == found


def test_one_core_is_enough() -> None:
    code = (
        "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
        "from ridgeline import _kernels as k\n"
        "import test_kernels_pool as t\n"
        "assert k.usable_cores() == 1\n"
        "print(abs(t.product(k.Pool(4)) - t.product(k.Pool(1))).max())"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *(p for p in sys.path if p)])}
    run = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert run.stdout.strip() == "0.0", (run.returncode, run.stdout, run.stderr)


def test_usable_cores() -> None:
    assert 1 <= kernels.usable_cores() <= min(len(os.sched_getaffinity(0)), multiprocessing.cpu_count())
