"""States of recurrent layers that stay where they lie: a kernel reads them in their pages and writes them there.

A step would otherwise copy them out of the pages, make new ones, and copy those back: of many sequences more bytes than
the weights, through memory that is fresh each time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from ridgeline._kernels import Pool
from ridgeline.ops import api
from ridgeline.ops.cpu.kernel import Kernel, Kernels, never
from ridgeline.ops.cpu.matrices import Floats
from ridgeline.ops.host import recurrent as host

Ints = np.ndarray[Any, np.dtype[np.int64]]


class Places(NamedTuple):
    """For a kernel: where states are and are to be; in which pages of those, None where they are no pages."""

    before: Floats
    after: Floats
    read: Ints | None
    write: Ints | None


class StatesInPages:
    """The states of N sequences: what READ_STATE would copy, not copied. Indexed by sequences it is a copy of theirs.

    Sequences neither write where another one reads, nor two to one page.
    """

    def __init__(self, pages: Floats, read: Ints, fresh: Ints, write: Ints) -> None:
        self._pages, self._read, self._fresh, self._write = pages, read, fresh, write

    def __getitem__(self, members: Any) -> Floats:
        found: Floats = host.read_state(self._pages, *(x[members] for x in (self._read, self._fresh, self._write)))
        return found

    def places(self) -> Places:
        """For a kernel, once: a sequence that begins goes on from zeros where its state will be."""
        read, begins = self._read, self._fresh != 0
        if begins.any():
            self._pages[self._write[begins]] = 0.0
            read = np.where(begins, self._write, read)
        return Places(self._pages, self._pages, read, self._write)


State = Floats | StatesInPages


def places_of(states: State) -> tuple[State, Places]:
    """What a kernel leaves, and where it finds and leaves it."""
    if isinstance(states, StatesInPages):
        return states, states.places()
    after = np.empty(states.shape, np.float32)
    return after, Places(states, after, None, None)


def read_state(case: None, pool: Pool) -> Callable[[Floats, Ints, Ints, Ints], StatesInPages]:
    return StatesInPages


def write_state(case: None, pool: Pool) -> Callable[[Floats, Ints, State], None]:
    def run(pages: Floats, write: Ints, states: State) -> None:
        if not isinstance(states, StatesInPages):  # which are there
            host.write_state(pages, write, states)

    return run


KERNELS: Kernels = {api.READ_STATE: Kernel(never, read_state), api.WRITE_STATE: Kernel(never, write_state)}
