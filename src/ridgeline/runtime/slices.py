"""Compute all parts of a model that is cut in one process, one after the other: the fast oracle for ranks.

Each slice is what a rank is: its part of the spec and of the weights, its own pages, the same loop. Only the transport
differs, so n slices give the bits of n ranks. A slice runs until it needs a number of another one; then the next slice
runs. Each has a thread only because it waits in the middle of a step: no two of them run at the same time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import Semaphore, Thread
from typing import Any

import numpy as np

from ridgeline.errors import RankError
from ridgeline.nn.group import Ndarray
from ridgeline.runtime.follow import follow
from ridgeline.runtime.load import LoadedModel, LoadOptions, load_model


class _Table:
    """State of all slices. turns: released for the slice that runs next. gone: whether a slice has ended."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.turns = [Semaphore(0) for _ in range(size)]
        self.parts: dict[int, list[Ndarray]] = {}  # of each sum that not all slices have read
        self.orders: list[deque[object]] = [deque() for _ in range(size)]
        self.lost: BaseException | None = None
        self.is_over = False


class SliceGroup:
    """A group (nn.group.Group) of slices in one process."""

    def __init__(self, rank: int, table: _Table) -> None:
        self.rank, self.size, self._table = rank, table.size, table
        self._calls = 0

    def gather(self, part: Ndarray) -> Sequence[Ndarray]:
        table, call = self._table, self._calls
        self._check()
        self._calls += 1
        table.parts.setdefault(call, []).append(np.array(part))  # kernels may write the next result there
        self._pass_on()
        if self.rank == self.size - 1:
            return table.parts.pop(call)
        return table.parts[call]

    def broadcast(self, message: object = None) -> Any:
        self._check()
        own = self._table.orders[self.rank]
        if self.rank == 0:
            for orders in self._table.orders[1:]:
                orders.append(message)
            return message
        while not own:
            self._pass_on()
        return own.popleft()

    def leave(self) -> None:
        self._table.lost = self._table.lost or RankError(f"slice {self.rank} of {self.size} could not go on")

    def _pass_on(self) -> None:
        """Let the next slice run, and wait until it is this one's turn again."""
        self._table.turns[(self.rank + 1) % self.size].release()
        self._table.turns[self.rank].acquire()
        self._check()

    def _check(self) -> None:
        table = self._table
        if table.is_over and self.rank:
            raise RankError("the slices are over")
        if table.lost is not None:
            raise RankError(f"a slice of {self.size} was lost: {table.lost}") from table.lost


@contextmanager
def open_slices(
    name: str, options: LoadOptions, size: int, prepare: Callable[[LoadedModel], LoadedModel] = lambda loaded: loaded
) -> Iterator[LoadedModel]:
    """Yield slice 0 of a model that is cut into `size` slices. The others follow it.

    prepare: changes each slice after it was loaded. Raises as `load_model`, and RequestError for a model that cannot be
    cut.
    """
    table = _Table(size)
    first = prepare(load_model(name, options, group=SliceGroup(0, table)))
    rest = [
        prepare(load_model(name, options, table=first.table, group=SliceGroup(rank, table)))
        for rank in range(1, size)
    ]  # fmt: skip
    threads = [Thread(target=_run, args=(loaded, table), daemon=True) for loaded in rest]
    for thread in threads:
        thread.start()
    try:
        yield first
    finally:
        table.is_over = True
        for turn, thread in zip(table.turns[1:], threads, strict=True):
            turn.release()
            thread.join()


def _run(loaded: LoadedModel, table: _Table) -> None:
    """Follow slice 0 when it is this slice's turn."""
    rank = loaded.spec.rank
    table.turns[rank].acquire()
    try:
        if not table.is_over:
            follow(loaded)
    except RankError:
        pass  # slice 0 knows already
    except Exception as e:  # slice 0 raises it in its own thread
        table.lost = table.lost or e
    finally:
        table.turns[(rank + 1) % table.size].release()
