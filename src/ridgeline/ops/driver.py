"""Protocols for running the kernels of a device, and for recording and repeating their calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from ridgeline.ops.api import Array
from ridgeline.ops.noise import Ints

Fetched = Callable[[], list[np.ndarray[Any, Any]]]  # waits for copies on the host, and returns them


class Recorded(NamedTuple):
    """Work that can be run again without Python.

    results: arrays that hold its results until any recorded work runs again.
    """

    results: Sequence[Array]
    run: Callable[[], None]


class Sizes(NamedTuple):
    """Limits of the steps that a device records.

    sequences: numbers of sequences, ascending; a step without drafts is filled up to the next of them. tokens: most
    tokens of a step. graphs, rows: most recordings that an engine keeps, and most tokens of all of them together; the
    recording that was not used for the longest time is dropped.
    """

    sequences: tuple[int, ...]
    tokens: int
    graphs: int
    rows: int


# On a CPU, a recording of more sequences or tokens saves a small share of the time. On a GPU, spare rows cost little:
# decode reads the weights once for all rows.
CPU_SIZES = Sizes(tuple(range(1, 33)), 72, 64, 64 * 72)
GPU_SIZES = Sizes((1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256), 256, 64, 2048)


class Recorder(Protocol):
    """Records kernel calls for one engine. All that it has recorded shares memory."""

    def input(self, n: int) -> Array:
        """Return a new array of n integers that recorded work may read."""
        ...

    def words(self, n: int) -> Array:
        """Return a new array of n integers of 64 bits that recorded work may read."""
        ...

    def first(self, array: Array, n: int) -> Array:
        """Return the first n numbers of an array as a view."""
        ...

    def matrix(self, array: Array, columns: int) -> Array:
        """Return an array [n * columns] as a view [n, columns]."""
        ...

    def assign(self, array: Array, values: Sequence[int] | Ints) -> None:
        """Write all numbers of an input, or of a view of its first ones; recorded work that runs later reads them."""
        ...

    def record(self, work: Callable[[], Sequence[Array]], known: Sequence[Array]) -> Recorded | str:
        """Run `work` as often as recording needs, and record it; or return why it cannot be recorded.

        known: arrays besides the inputs that `work` uses; they must not move. From equal contents `work` must compute
        equal results, however often it runs. The results are there afterwards.
        """
        ...


class Mirrors(Protocol):
    """Copies of the host's arrays of integers, which recorded work reads. arrays: the copies, in order."""

    @property
    def arrays(self) -> Sequence[Array]: ...

    def write(self, changes: Sequence[tuple[int, int, int, Sequence[int]]]) -> None:
        """Take over numbers that the host wrote: the array's index, the row, the first column, and the numbers."""
        ...


class Driver(Protocol):
    """Runs the kernels of a device.

    threads: number of threads of the kernels; None: they have none. sizes: limits of recorded steps. runs_ahead: the
    host goes on while the device computes, so that it does not know a step's tokens when it submits the next one.
    """

    @property
    def threads(self) -> int | None: ...

    @property
    def sizes(self) -> Sizes: ...
    @property
    def runs_ahead(self) -> bool: ...

    def kernel_seconds(self) -> float:
        """Return the seconds that kernels have run so far; 0 where nobody counts them."""
        ...

    def rounded_refusal(self) -> str:
        """Return why attention over keys and values of 16 bits cannot be rounded to bfloat16; empty if it can."""
        ...

    def round_attention(self, *, rounds: bool) -> None:
        """Choose whether such attention is rounded from now on. Call it between steps, and only if it can be."""
        ...

    def recorder(self) -> Recorder:
        """Return a new recorder."""
        ...

    def fetch(self, arrays: Sequence[Array]) -> Fetched:
        """Begin to copy arrays to the host; they may change afterwards. The function waits and returns the copies."""
        ...

    def mirrors(self, arrays: Sequence[Ints]) -> Mirrors:
        """Return copies of arrays [rows, columns] of the host; the arrays themselves where kernels can read them."""
        ...

    def reset(self) -> None:
        """Wait until the device has nothing to do, and make the kernels ready again after a step that failed."""
        ...
