"""Helper processes with limits: a job that exceeds one ends with an error that names it, and the next job runs."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cpu import bounded_jobs as jobs
from ridgeline.bounded import BoundedPool, Limits, Setup
from ridgeline.bounded.pool import JobFailed
from ridgeline.errors import BoundExceeded, HelpersBusy, RequestError

linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux enforces RLIMIT_AS")


@pytest.fixture(scope="module")
def pool() -> Iterator[BoundedPool]:
    pool = BoundedPool(1)
    yield pool
    pool.close()
    assert pool.pids() == []


def gone(pid: int) -> bool:
    """Return whether the process ends within a minute. A zombie has ended."""
    for _ in range(6000):
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.01)
    return False


def test_values_survive_a_round_trip(pool: BoundedPool) -> None:
    values: list[Any] = [b"\0\xff" * 1000, "\ud800 é \U0001f600", {"a": [1, 2.5, None, True]}, -(1 << 70)]
    assert pool.run_sync(jobs.echo, *values) == (None, *values)
    assert pool.run_sync(jobs.write) == 7


def test_a_helper_serves_many_jobs(pool: BoundedPool) -> None:
    pool.run_sync(jobs.echo)
    before = pool.pids()
    for i in range(20):
        assert pool.run_sync(jobs.echo, i) == (None, i)
    assert pool.pids() == before and len(before) == 1


BEYOND = [
    (jobs.loop, (), Limits(seconds=0.2), "it takes longer than the limit of 0.2 s"),
    (jobs.loop_without_the_interpreter, (), Limits(seconds=0.2), "it takes longer than the limit of 0.2 s"),
    (jobs.overflow_the_stack, (), Limits(60, stack_bytes=1 << 20), "it needs more stack than the limit of 1 MiB"),
    (jobs.recurse, (), Limits(60), "it is nested too deeply for the limit of 1000 calls"),
    (jobs.abort, (), Limits(60, 1 << 29), "it needs more than the limits of 512 MiB of memory or 8 MiB of stack"),
    (jobs.big_result, (1 << 20,), Limits(60, result_bytes=1 << 19), "the result exceeds the limit of 524288 bytes"),
]


@pytest.mark.parametrize(("function", "args", "limits", "text"), BEYOND, ids=lambda v: getattr(v, "__name__", None))
def test_beyond_a_limit(pool: BoundedPool, function: Any, args: tuple[Any, ...], limits: Limits, text: str) -> None:
    with pytest.raises(BoundExceeded) as e:
        pool.run_sync(function, *args, limits=limits)
    assert str(e.value) == text
    assert pool.run_sync(jobs.echo, 1) == (None, 1)


@linux
def test_memory(pool: BoundedPool) -> None:
    """The limit counts the memory of a job, and the next job has its own."""
    with pytest.raises(BoundExceeded, match="it needs more memory than the limit of 64 MiB"):
        pool.run_sync(jobs.eat_memory, 100 << 20, limits=Limits(60, 64 << 20))
    assert pool.run_sync(jobs.eat_memory, 100 << 20, limits=Limits(60, 256 << 20)) == 100 << 20


def test_errors_of_a_job(pool: BoundedPool) -> None:
    with pytest.raises(RequestError, match="no, thank you"):
        pool.run_sync(jobs.refuse, "no, thank you")
    with pytest.raises(JobFailed, match="KeyError: 'a fault of ours'"):
        pool.run_sync(jobs.fail)
    with pytest.raises(ValueError, match="not_a_job is not marked"):
        pool.run_sync(jobs.not_a_job)
    with pytest.raises(TypeError):  # an argument that cannot be sent
        pool.run_sync(jobs.echo, object())
    with pytest.raises(JobFailed, match="the result cannot be sent"):
        pool.run_sync(jobs.nothing_to_send)
    assert pool.run_sync(jobs.echo, 1) == (None, 1)


@linux
def test_surroundings(pool: BoundedPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A helper has no keys and no files of its parent, and can open neither sockets nor processes."""
    monkeypatch.setenv("RIDGELINE_API_KEY", "secret")
    monkeypatch.setenv("HF_TOKEN", "secret")
    with BoundedPool(1) as fresh, Path(__file__).open() as file:
        os.set_inheritable(file.fileno(), True)
        names, files, blocked = fresh.run_sync(jobs.surroundings)
    assert not {"RIDGELINE_API_KEY", "HF_TOKEN"} & set(names)
    assert files <= 5  # the three standard streams, the pipe of answers, and the folder that is listed
    assert blocked == [True] * 3


def test_setup_runs_once_in_each_helper() -> None:
    with BoundedPool(1, setup=Setup(jobs.setup, ("clay",))) as pool:
        assert pool.run_sync(jobs.echo, 1) == ("made of clay", 1)
        with pytest.raises(BoundExceeded):
            pool.run_sync(jobs.abort)
        assert pool.run_sync(jobs.echo, 2) == ("made of clay", 2)


@linux
def test_memory_is_given_back() -> None:
    """A helper that keeps too much memory is replaced."""
    with BoundedPool(1) as pool:
        pool.run_sync(jobs.echo)
        (first,) = pool.pids()
        pool.run_sync(jobs.eat_memory, 300 << 20)  # freed when the job ends
        assert pool.run_sync(jobs.echo) is None and pool.pids() == [first]
        pool.run_sync(jobs.hoard, 200 << 20)
        assert pool.run_sync(jobs.echo) is None and pool.pids() != [first]


def test_a_canceled_caller_ends_its_job() -> None:
    async def scenario() -> None:
        with BoundedPool(1) as pool:
            await pool.run(jobs.echo)
            (first,) = pool.pids()
            running = asyncio.create_task(pool.run(jobs.sleep, 600.0, limits=Limits(600)))
            waiting = asyncio.create_task(pool.run(jobs.sleep, 600.0, limits=Limits(600)))
            await asyncio.sleep(0.05)
            waiting.cancel()
            running.cancel()
            results = await asyncio.gather(running, waiting, return_exceptions=True)
            assert all(isinstance(e, asyncio.CancelledError) for e in results)
            assert await pool.run(jobs.echo, 1) == (None, 1)
            assert gone(first)

    asyncio.run(scenario())


def test_the_queue_is_bounded() -> None:
    async def scenario() -> None:
        with BoundedPool(1, max_waiting=1) as pool:
            tasks = [asyncio.create_task(pool.run(jobs.sleep, 600.0, limits=Limits(600))) for _ in range(2)]
            await asyncio.sleep(0)
            with pytest.raises(HelpersBusy, match="2 other jobs are waiting"):
                await pool.run(jobs.echo)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            assert await pool.run(jobs.echo, 1) == (None, 1)

    asyncio.run(scenario())


def test_after_the_end() -> None:
    pool = BoundedPool(1)
    pool.run_sync(jobs.echo)
    (pid,) = pool.pids()
    pool.close()
    assert gone(pid)
    with pytest.raises(HelpersBusy, match="have ended"):
        pool.run_sync(jobs.echo)


@linux
@pytest.mark.parametrize("job", ["echo", "loop", "sleep, 600.0"])
def test_helpers_die_with_their_parent(job: str) -> None:
    """A parent that is killed without cleanup takes its helpers with it, whether they are idle or run a job."""
    script = f"""
        import threading, time
        from cpu import bounded_jobs as jobs
        from ridgeline.bounded import BoundedPool, Limits

        pool = BoundedPool(1)
        pool.run_sync(jobs.echo)
        print(pool.pids()[0], flush=True)
        pool.run_sync(jobs.{job}, limits=Limits(600))
        time.sleep(600)
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[1]) as parent:
        assert parent.stdout is not None
        helper = int(parent.stdout.readline())
        parent.kill()
    assert gone(helper)
