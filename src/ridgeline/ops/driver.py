"""Protocols for running the kernels of a device, and for recording and repeating their calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from ridgeline.ops.api import Array
from ridgeline.ops.noise import Ints


class Recorded(NamedTuple):
    """Work that can be run again without Python.

    results: arrays that hold its results until any recorded work runs again.
    """

    results: Sequence[Array]
    run: Callable[[], None]


class Recorder(Protocol):
    """Records kernel calls for one engine. All that it has recorded shares memory."""

    def input(self, n: int) -> Array:
        """Return a new array of n integers that recorded work may read."""
        ...

    def first(self, array: Array, n: int) -> Array:
        """Return the first n numbers of an input as a view."""
        ...

    def assign(self, array: Array, values: Sequence[int] | Ints) -> None:
        """Write all numbers of an input, or of a view of its first ones."""
        ...

    def record(self, work: Callable[[], Sequence[Array]], known: Sequence[Array]) -> Recorded | str:
        """Run `work` as often as recording needs, and record it; or return why it cannot be recorded.

        known: arrays besides the inputs that `work` uses; they must not move. From equal contents `work` must compute
        equal results, however often it runs.
        """
        ...


class Driver(Protocol):
    """Runs the kernels of a device."""

    @property
    def threads(self) -> int: ...

    def kernel_seconds(self) -> float:
        """Return the seconds that kernels have run so far."""
        ...

    def recorder(self) -> Recorder:
        """Return a new recorder."""
        ...
