"""States of recurrent layers that stay in their pages: kernels read and write them there.

Otherwise each step would copy states out of the pages, allocate new ones, and copy those back. For many
sequences, these are more bytes than the weights.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from ridgeline import _kernels
from ridgeline._kernels import Pool
from ridgeline.ops import api
from ridgeline.ops.cpu.kernel import Kernel, Kernels, empty, integers, never
from ridgeline.ops.cpu.matrices import Floats
from ridgeline.ops.host import recurrent as host

Ints = np.ndarray[Any, np.dtype[np.int64]]


class Location(NamedTuple):
    """Arrays that a kernel reads states from and writes them to.

    read, write: the pages of each sequence in these arrays; None where the arrays are no pages.
    """

    before: Floats
    after: Floats
    read: Ints | None
    write: Ints | None


class StatesInPages:
    """The states of N sequences in their pages. Indexing by sequences copies their states.

    No sequence writes to a page that another one reads or writes.
    """

    def __init__(self, pool: Pool, pages: Floats, read: Ints, fresh: Ints, write: Ints) -> None:
        self._pool, self._pages, self._read, self._fresh, self._write = pool, pages, read, fresh, write

    def __getitem__(self, members: Any) -> Floats:
        found: Floats = host.read_state(self._pages, *(x[members] for x in (self._read, self._fresh, self._write)))
        return found

    def locate(self) -> Location:
        """Return the arrays for one kernel, after filling the pages of sequences that begin with zeros."""
        read = integers(self._pool, len(self._write))
        _kernels.begin_states(self._pool, self._pages, self._read, self._fresh, self._write, read)
        return Location(self._pages, self._pages, read, self._write)

    def aside(self) -> StatesAside:
        """Return these states, once they are written, for a kernel that must leave the pages as they are."""
        return StatesAside(self._pool, self._pages, self._write)


class StatesAside:
    """States in their pages, from which a kernel goes on; the states after it are lost."""

    def __init__(self, pool: Pool, pages: Floats, read: Ints) -> None:
        self._pool, self._pages, self._read = pool, pages, read

    def locate(self) -> Location:
        """Return the arrays for one kernel."""
        lost = empty(self._pool, len(self._read), *self._pages.shape[1:])
        return Location(self._pages, lost, self._read, None)


State = Floats | StatesInPages | StatesAside


def locate(states: State) -> tuple[State, Location]:
    """Return the states after a kernel, and the arrays that the kernel reads and writes."""
    if isinstance(states, (StatesInPages, StatesAside)):
        return states, states.locate()
    after = np.empty(states.shape, np.float32)
    return after, Location(states, after, None, None)


def read_state(case: None, pool: Pool) -> Callable[[Floats, Ints, Ints, Ints], StatesInPages]:
    return partial(StatesInPages, pool)


def write_state(case: None, pool: Pool) -> Callable[[Floats, Ints, State], None]:
    def run(pages: Floats, write: Ints, states: State) -> None:
        if isinstance(states, np.ndarray):  # others are in their pages already
            _kernels.write_rows(pool, pages, write, states)

    return run


KERNELS: Kernels = {api.READ_STATE: Kernel(never, read_state), api.WRITE_STATE: Kernel(never, write_state)}
