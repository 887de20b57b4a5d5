"""Steps that are run again without Python: what the kernels were called with, written down."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ridgeline._kernels import Pool, Program, Rooms
from ridgeline.ops.driver import Recorded

Ndarray = np.ndarray[Any, Any]


class CpuDriver:
    """A pool of threads."""

    def __init__(self, pool: Pool) -> None:
        self._pool, self._lock = pool, threading.Lock()

    @property
    def threads(self) -> int:
        return self._pool.size

    def kernel_seconds(self) -> float:
        return self._pool.busy_seconds

    def recorder(self) -> CpuRecorder:
        return CpuRecorder(self._pool, self._lock)


class CpuRecorder:
    """lock: held while something is written down of the pool's calls."""

    def __init__(self, pool: Pool, lock: threading.Lock) -> None:
        self._pool, self._lock, self._rooms = pool, lock, Rooms()
        self._inputs: list[Ndarray] = []
        self._is_right = False  # a program of these rooms was seen to do what the work itself does

    def input(self, n: int) -> Ndarray:
        self._inputs.append(np.zeros(n, np.int64))
        return self._inputs[-1]

    def first(self, array: Any, n: int) -> Ndarray:
        numbers: Ndarray = array[:n]
        return numbers

    def assign(self, array: Any, values: Sequence[int]) -> None:
        array[:] = values

    def record(self, work: Callable[[], Sequence[Any]], known: Sequence[Any]) -> Recorded | str:
        program = Program(self._pool, self._rooms)
        for array in (*self._inputs, *known):
            if array.strides[-1] == array.itemsize:  # what is not dense is copied before a kernel sees it
                program.know(array.view(np.uint8))
        with self._lock:
            results = [_borrow(program, x) for x in program.record(work)]
        reason = program.refusal or self._check(program, results)
        return Recorded(results, program) if reason is None else reason

    def _check(self, program: Program, results: Sequence[Ndarray]) -> str | None:
        """Does the program make what the work made, out of its inputs alone? Asked of the first one."""
        if self._is_right:
            return None
        wanted = [x.tobytes() for x in results]
        self._rooms.poison()
        program()
        self._is_right = [x.tobytes() for x in results] == wanted
        return None if self._is_right else "something between its kernels is not written down"


def _borrow(program: Program, array: Ndarray) -> Ndarray:
    return program.borrow(array.view(np.float32)).view(array.dtype)
