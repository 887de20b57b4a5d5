"""Record the kernel calls of a step, to run them again without Python."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ridgeline._kernels import Pool, Program, Rooms, rounded_refusal
from ridgeline.ops.driver import CPU_SIZES, Fetched, Recorded
from ridgeline.ops.noise import Ints

Ndarray = np.ndarray[Any, Any]


class CpuDriver:
    """Runs kernels on a pool of threads, and records their calls."""

    sizes, runs_ahead = CPU_SIZES, False

    def __init__(self, pool: Pool) -> None:
        self._pool, self._lock = pool, threading.Lock()

    @property
    def threads(self) -> int:
        return self._pool.size

    def kernel_seconds(self) -> float:
        return self._pool.busy_seconds

    def rounded_refusal(self) -> str:
        refusal = rounded_refusal()
        return f"it needs dot products of bfloat16, but {refusal}" if refusal else ""

    def round_attention(self, *, rounds: bool) -> None:
        self._pool.rounds_attention = rounds

    def recorder(self) -> CpuRecorder:
        return CpuRecorder(self._pool, self._lock)

    def fetch(self, arrays: Sequence[Any]) -> Fetched:
        found = [np.asarray(array) for array in arrays]
        return lambda: found

    def mirrors(self, arrays: Sequence[Ints]) -> Shared:
        return Shared(arrays)

    def reset(self) -> None:
        """Do nothing: kernels end before their calls return."""


class Shared:
    """The arrays of the host, which the kernels read themselves."""

    def __init__(self, arrays: Sequence[Ints]) -> None:
        self.arrays = arrays

    def write(self, changes: Sequence[tuple[int, int, int, Sequence[int]]]) -> None:
        """Do nothing: the host wrote the numbers already."""


class CpuRecorder:
    """Records programs of one pool. lock: held while a program is recorded."""

    def __init__(self, pool: Pool, lock: threading.Lock) -> None:
        self._pool, self._lock, self._rooms = pool, lock, Rooms()
        self._inputs: list[Ndarray] = []
        self._is_right = False  # a recorded program has given the results of the work itself

    def input(self, n: int) -> Ndarray:
        self._inputs.append(np.zeros(n, np.int64))
        return self._inputs[-1]

    def words(self, n: int) -> Ndarray:
        return self.input(n)

    def first(self, array: Any, n: int) -> Ndarray:
        numbers: Ndarray = array[:n]
        return numbers

    def matrix(self, array: Any, columns: int) -> Ndarray:
        found: Ndarray = array.reshape(-1, columns)
        return found

    def assign(self, array: Any, values: Sequence[int] | Ints) -> None:
        array[:] = values

    def record(self, work: Callable[[], Sequence[Any]], known: Sequence[Any]) -> Recorded | str:
        program = Program(self._pool, self._rooms)
        for array in (*self._inputs, *known):
            if array.strides[-1] == array.itemsize:  # kernels get a copy of an array that is not dense
                program.know(array.view(np.uint8))
        with self._lock:
            results = [_borrow(program, x) for x in program.record(work)]
        reason = program.refusal or self._check(program, results)
        return Recorded(results, program) if reason is None else reason

    def _check(self, program: Program, results: Sequence[Ndarray]) -> str | None:
        """Return why the program does not repeat the work's results from its inputs; None if it does. Checked once."""
        if self._is_right:
            return None
        wanted = [x.tobytes() for x in results]
        self._rooms.poison()
        program()
        self._is_right = [x.tobytes() for x in results] == wanted
        return None if self._is_right else "the work does something besides calling kernels"


def _borrow(program: Program, array: Ndarray) -> Ndarray:
    return program.borrow(array.view(np.float32)).view(array.dtype)
