"""What runs the kernels of a device, and how it runs some of them again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from ridgeline.ops.api import Array


class Recorded(NamedTuple):
    """Work that can be run again without Python. results: where it leaves them, until anything recorded runs again."""

    results: Sequence[Array]
    run: Callable[[], None]


class Recorder(Protocol):
    """Writes down the kernels' calls of some work. For one engine: what it has recorded shares memory."""

    def input(self, n: int) -> Array:
        """A new array of n whole numbers, which recorded work may read."""
        ...

    def first(self, array: Array, n: int) -> Array:
        """The first n numbers of an input, sharing memory."""
        ...

    def assign(self, array: Array, values: Sequence[int]) -> None:
        """Write all numbers of an input, or of its first ones."""
        ...

    def record(self, work: Callable[[], Sequence[Array]], known: Sequence[Array]) -> Recorded | str:
        """Run `work` as often as that takes, and write it down; or say why that cannot be.

        known: besides inputs, what it works on; these arrays stay where they are. Of the same contents it must make
        the same, however often it runs.
        """
        ...


class Driver(Protocol):
    """What runs the kernels of a device."""

    @property
    def threads(self) -> int: ...

    def kernel_seconds(self) -> float:
        """How long kernels have run so far."""
        ...

    def recorder(self) -> Recorder:
        """A new one."""
        ...
