"""Keep a small, fixed number of helper processes: start them on first use, and replace them when they die."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ridgeline import errors
from ridgeline.bounded.frames import FrameTooLarge, Value, encode, read_frame, write_frame
from ridgeline.bounded.jobs import name_of
from ridgeline.bounded.limits import Limits
from ridgeline.errors import BoundExceeded, HelpersBusy, RidgelineError

# Environment variables that a helper inherits. API keys and hub tokens are not among them.
_KEPT = ("PATH", "LANG", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "TMPDIR", "TEMP", "TMP", "SYSTEMROOT", "VIRTUAL_ENV")
_MEBI = 1 << 20
JOB_LIMITS, SETUP_LIMITS = Limits(), Limits(60.0)


@dataclass(frozen=True, slots=True)
class Setup:
    """A call that each helper makes once, before its first job: `function(*arguments)`, marked with `job`.

    Its value stays in the helper and is the first argument of every job.
    """

    function: Callable[..., Any]
    arguments: tuple[Value, ...] = ()
    limits: Limits = SETUP_LIMITS


class JobFailed(RuntimeError):
    """A job raised an error that is not a RidgelineError: a bug."""


class BoundedPool:
    """Runs jobs in helper processes. Safe to call from several threads and event loops.

    size: number of helper processes. max_waiting: number of jobs that may wait for a helper. setup: a call that each
    helper makes before its first job.
    """

    def __init__(self, size: int = 1, *, max_waiting: int = 16, setup: Setup | None = None) -> None:
        self._setup, self._most = setup, size + max_waiting
        self._threads = ThreadPoolExecutor(size, "ridgeline-bounded")  # each drives one helper
        self._lock = threading.Lock()
        self._helpers: set[_Helper] = set()  # all living helpers
        self._idle: list[_Helper] = []
        self._open = 0  # number of jobs that run or wait
        self._closed = False
        weakref.finalize(self, _end_all, self._helpers)  # runs at the end of the program, too

    async def run(self, function: Callable[..., Any], *args: Value, limits: Limits = JOB_LIMITS) -> Any:
        """Run `function(state, *args)` in a helper and return its value. A canceled call kills its helper.

        function: marked with `job`. Raises BoundExceeded, which names the limit; HelpersBusy if too many jobs wait;
        a RidgelineError of the job as it is; JobFailed for its other errors.
        """
        ticket, future = self._submit(function, args, limits)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            ticket.cancel()
            raise

    def run_sync(self, function: Callable[..., Any], *args: Value, limits: Limits = JOB_LIMITS) -> Any:
        """Do the same as `run`, but wait in this thread."""
        ticket, future = self._submit(function, args, limits)
        try:
            return future.result()
        except BaseException:  # the wait was interrupted; canceling a finished job does nothing
            ticket.cancel()
            raise

    def close(self) -> None:
        """End all helpers at once. Running jobs fail with BoundExceeded."""
        with self._lock:
            self._closed = True
            for helper in self._helpers:
                helper.kill()
        self._threads.shutdown(wait=True, cancel_futures=True)
        _end_all(self._helpers)

    def __enter__(self) -> BoundedPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def pids(self) -> list[int]:
        """Return the process ids of the living helpers."""
        with self._lock:
            return [helper.pid for helper in self._helpers]

    def _submit(
        self, function: Callable[..., Any], args: tuple[Value, ...], limits: Limits
    ) -> tuple[_Ticket, Future[Any]]:
        name, ticket = name_of(function), _Ticket()
        with self._lock:
            if self._open >= self._most:
                raise HelpersBusy(f"{self._open} other jobs are waiting for a helper process; try again in a moment")
            self._open += 1
        try:
            future = self._threads.submit(self._work, ticket, name, args, limits)
        except RuntimeError:  # closed
            self._leave()
            raise HelpersBusy("the helper processes have ended; the program is stopping") from None
        future.add_done_callback(lambda _: self._leave())
        return ticket, future

    def _leave(self) -> None:
        with self._lock:
            self._open -= 1

    def _work(self, ticket: _Ticket, name: str, args: tuple[Value, ...], limits: Limits) -> Any:
        if ticket.canceled:
            raise HelpersBusy("the job was canceled before it began")
        helper = self._take()
        try:
            if not ticket.assign(helper):
                raise HelpersBusy("the job was canceled before it began")
            if self._setup is not None and not helper.ready:
                helper.call(name_of(self._setup.function), self._setup.arguments, self._setup.limits, keep=True)
            return helper.call(name, args, limits)
        finally:
            ticket.assign(None)
            self._give_back(helper)

    def _take(self) -> _Helper:
        with self._lock:
            helper = self._idle.pop() if self._idle else None
        if helper is not None and helper.alive:
            return helper
        self._drop(helper)
        helper = _Helper()
        with self._lock:
            self._helpers.add(helper)
            if self._closed:
                helper.kill()
        return helper

    def _give_back(self, helper: _Helper) -> None:
        with self._lock:
            keep = helper.usable and not self._closed
            if keep:
                self._idle.append(helper)
        if not keep:
            self._drop(helper)

    def _drop(self, helper: _Helper | None) -> None:
        if helper is not None:
            helper.end()
            with self._lock:
                self._helpers.discard(helper)


class _Ticket:
    """Connects a caller with the helper that works for it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._helper: _Helper | None = None
        self.canceled = False

    def assign(self, helper: _Helper | None) -> bool:
        """Set the helper that works for the caller; None: no helper. Returns False if the caller has canceled."""
        with self._lock:
            self._helper = helper
            return not self.canceled

    def cancel(self) -> None:
        with self._lock:
            self.canceled = True
            if self._helper is not None:
                self._helper.kill()


class _Helper:
    """One process and its pipes. One thread at a time calls it; any thread may kill it."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "ridgeline.bounded.child", str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # the messages of a job that a limit ends
            env=_environment(),
            start_new_session=True,  # Ctrl-C reaches only the parent
        )
        self.ready = False  # whether the setup is done
        self.usable = True
        self._late = False

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        """Kill the process. The thread that uses it cleans up."""
        self.usable = False
        with contextlib.suppress(OSError):
            self._process.kill()

    def end(self) -> None:
        """Kill the process if it lives, wait until it is gone and close the pipes."""
        self.kill()
        self._process.wait()
        for file in (self._process.stdin, self._process.stdout):
            if file is not None:
                with contextlib.suppress(OSError):
                    file.close()

    def call(self, name: str, args: tuple[Value, ...], limits: Limits, *, keep: bool = False) -> Any:
        """Run one job. Raises the errors of BoundedPool.run."""
        message = encode([name, keep, asdict(limits), *args])
        timer = threading.Timer(limits.seconds, self._too_late)
        timer.daemon = True
        timer.start()
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            write_frame(self._process.stdin, message)
            retire, status, *values = read_frame(self._process.stdout, limits.result_bytes)
        except FrameTooLarge:
            self.usable = False
            raise BoundExceeded(f"the result exceeds the limit of {limits.result_bytes} bytes") from None
        except (OSError, EOFError, ValueError):
            self.end()
            raise BoundExceeded(_why(self._process.returncode, self._late, limits)) from None
        finally:
            timer.cancel()
        self.usable = self.usable and not retire
        if status == "ok":
            self.ready = self.ready or keep
            return values[0] if len(values) == 1 else tuple(values)
        raise _as_error(*values, limits=limits)

    def _too_late(self) -> None:
        self._late = True
        self.kill()


def _end_all(helpers: set[_Helper]) -> None:
    while helpers:
        helpers.pop().end()


def _environment() -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if k in _KEPT or k.startswith(("LC_", "PYTHON"))}
    return kept | {
        "PYTHONPATH": os.pathsep.join(
            path or str(Path.cwd()) for path in sys.path
        ),  # so that the helper imports the same modules
        "MALLOC_ARENA_MAX": "1",  # gives back the memory of threads that have ended
        "TOKENIZERS_PARALLELISM": "false",
    }


def _as_error(kind: str, message: str, *, limits: Limits) -> Exception:
    if kind == "MemoryError":
        return BoundExceeded(f"it needs more memory than the limit of {_mebi(limits.memory_bytes)}")
    if kind == "RecursionError":
        return BoundExceeded(f"it is nested too deeply for the limit of {sys.getrecursionlimit()} calls")
    known = getattr(errors, kind, None)
    if isinstance(known, type) and issubclass(known, RidgelineError):
        return known(message)
    return JobFailed(f"{kind}: {message}")


def _why(status: int, late: bool, limits: Limits) -> str:
    """Return why a helper died, as a sentence."""
    memory, stack = _mebi(limits.memory_bytes), _mebi(limits.stack_bytes)
    if late or -status == getattr(signal, "SIGXCPU", None):
        return f"it takes longer than the limit of {limits.seconds:g} s"
    if -status in (getattr(signal, "SIGSEGV", None), getattr(signal, "SIGBUS", None)) or status == 0xC00000FD:
        return f"it needs more stack than the limit of {stack}"
    if -status == getattr(signal, "SIGABRT", None):  # a library aborted
        return f"it needs more than the limits of {memory} of memory or {stack} of stack"
    return f"its helper process ended with status {status}; the limits are {limits.seconds:g} s and {memory} of memory"


def _mebi(size: int) -> str:
    return f"{size / _MEBI:g} MiB"
