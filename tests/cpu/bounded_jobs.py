"""Define jobs for the tests of the bounded helper processes: well-behaved ones, and one that exceeds each limit."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from ridgeline.bounded import job
from ridgeline.errors import RequestError


@job
def setup(what: str) -> str:
    return f"made of {what}"


@job
def echo(state: Any, *values: Any) -> Any:
    return (state, *values)


@job
def loop(state: Any) -> None:
    while True:
        pass


@job
def loop_without_the_interpreter(state: Any) -> bool:
    """Backtrack forever in C, where Python's threads cannot run."""
    return re.match(r"(a*)*b", "a" * 64) is None


@job
def sleep(state: Any, seconds: float) -> None:
    time.sleep(seconds)


@job
def eat_memory(state: Any, size: int) -> int:
    return len(bytearray(size))


@job
def overflow_the_stack(state: Any) -> None:
    """Recurse in C with a chain of iterators, each inside the one before."""
    chain: Any = iter([])
    for _ in range(300_000):
        chain = map(str, chain)
    next(chain)


@job
def recurse(state: Any) -> None:
    recurse(state)


@job
def refuse(state: Any, text: str) -> None:
    raise RequestError(text)


@job
def fail(state: Any) -> None:
    raise KeyError("a fault of ours")


@job
def abort(state: Any) -> None:
    os.kill(os.getpid(), signal.SIGABRT)


@job
def write(state: Any) -> int:
    """Print, as a library may do; it must not disturb the answer."""
    return print("noise", flush=True) or 7  # type: ignore[func-returns-value]


@job
def surroundings(state: Any) -> list[Any]:
    """Return what a job has access to: its environment, its open files, and whether sockets
    and processes are blocked.
    """
    blocked = []
    actions = (socket.socket, lambda: subprocess.run([sys.executable, "-c", ""]), lambda: os.system("true"))
    for action in actions:
        try:
            action()
        except PermissionError:
            blocked.append(True)
    return [sorted(os.environ), len([*Path("/proc/self/fd").iterdir()]), blocked]


@job
def big_result(state: Any, size: int) -> bytes:
    return b"x" * size


@job
def nothing_to_send(state: Any) -> object:
    return object()


_HOARD: list[bytearray] = []


@job
def hoard(state: Any, size: int) -> None:
    """Allocate memory that is never freed, and write to every page of it."""
    _HOARD.append(bytearray(b"x") * size)


def not_a_job(state: Any) -> None:
    raise AssertionError
