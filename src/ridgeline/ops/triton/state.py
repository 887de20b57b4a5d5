"""States of recurrent layers that stay in their pages: READ_STATE and WRITE_STATE.

Kernels read and write a state in its page, where it would otherwise be copied out, computed anew and copied back.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ridgeline.ops.reference import recurrent as definition


class Location(NamedTuple):
    """Arrays that a kernel reads states from and writes them to.

    read, fresh, write: pages of each sequence, and whether it begins with zeros; None where the arrays are no pages.
    """

    before: Tensor
    after: Tensor
    read: Tensor | None = None
    fresh: Tensor | None = None
    write: Tensor | None = None

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of a kernel that reads and writes states."""
        return {
            **self._asdict(), "before_stride": self.before.stride(0), "after_stride": self.after.stride(0),
            "IN_PAGES": self.read is not None,
        }  # fmt: skip


class StatesInPages:
    """The states of N sequences in their pages. Indexing by sequences copies their states.

    No sequence writes to a page that another one reads or writes.
    """

    def __init__(self, pages: Tensor, read: Tensor, fresh: Tensor, write: Tensor) -> None:
        self.pages, self.read, self.fresh, self.write = pages, read, fresh, write
        self._copy = definition.read_state(torch.float32)

    def __getitem__(self, members: Tensor) -> Tensor:
        return self._copy(self.pages, *(x[members] for x in (self.read, self.fresh, self.write)))


State = Tensor | StatesInPages


def locate(states: State) -> tuple[State, Location]:
    """Return the states after a kernel, and the arrays that the kernel reads and writes."""
    if isinstance(states, StatesInPages):
        return states, Location(states.pages, states.pages, states.read, states.fresh, states.write)
    states = states.contiguous()
    after = torch.empty_like(states)
    return after, Location(states, after)


def read_state(pages: Tensor, read: Tensor, fresh: Tensor, write: Tensor) -> State:
    """Return states in float32 in their pages, and copies of others."""
    if pages.dtype == torch.float32 and pages[0].is_contiguous():
        return StatesInPages(pages, read, fresh, write)
    return definition.read_state(torch.float32)(pages, read, fresh, write)


def write_state(pages: Tensor, write: Tensor, states: State) -> None:
    if not isinstance(states, StatesInPages):  # these are in their pages already
        definition.write_state(pages, write, states)
