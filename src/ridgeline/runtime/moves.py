"""Move the rows of accepted drafts of a tree to the slots of their positions, and whole pages group by group."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import cached_property

import numpy as np

from ridgeline.ops import OpsTable, api
from ridgeline.ops.api import Array
from ridgeline.runtime.arena import Arena
from ridgeline.runtime.layout import Ints
from ridgeline.sched.work import PageCopy, Result, Work
from ridgeline.spec import ModelSpec
from ridgeline.spec.groups import StateGroup

Move = Callable[[Sequence[Array], Array, Array, Array, Array], None]  # api.MOVE_ROWS


class RowMover:
    """Moves rows within the pages of a model. groups, page_tables: all groups of `arena` and their tables."""

    def __init__(
        self, table: OpsTable, arena: Arena, groups: Sequence[StateGroup], page_tables: Sequence[Ints],
        spec: ModelSpec,
    ) -> None:  # fmt: skip
        self._table, self._arena, self._groups, self._tables = table, arena, groups, page_tables
        self._layers = spec.layers

    def settle(self, works: Sequence[Work], results: Sequence[Result]) -> None:
        """Move the rows of each work's accepted drafts to neighboring slots after its known tokens."""
        found = list[tuple[int, int, int]]()
        for work, result in zip(works, results, strict=True):
            if not result.path:
                continue
            limit = work.start + len(work.tokens) - work.num_draft
            for depth, node in enumerate(result.path):
                if node != depth:
                    found.append((work.row, limit + node, limit + depth))
        if found:
            self._move(*np.array(found).T)

    def _move(self, rows: Ints, sources: Ints, targets: Ints) -> None:
        """Move rows from slots to others of the same sequences, in order."""
        integers = self._table.memory.integers
        for group, page_table, moves in zip(self._groups, self._tables, self._moves, strict=True):
            size = group.page_tokens
            at = [
                integers(x)
                for slots in (sources, targets)
                for x in (page_table[rows, slots // size], slots % size)
            ]  # fmt: skip
            for move, views in moves:
                move(views, *at)

    @cached_property
    def _moves(self) -> list[list[tuple[Move, Sequence[Array]]]]:
        """Return the primitive and the pages of each layer of each group, without the layers of a draft model."""

        def move(layer: int) -> tuple[Move, Sequence[Array]]:
            return self._table.primitive(api.MOVE_ROWS, self._layers[layer].mixer), self._arena.layer(layer)[1]

        own = len(self._layers)
        return [[move(slot.layer) for slot in group.slots if slot.layer < own] for group in self._groups]


def by_group(copies: Sequence[PageCopy]) -> list[tuple[int, list[int], list[int]]]:
    """Return the sources and the targets of copies of pages, group by group."""
    moves: dict[int, tuple[list[int], list[int]]] = {}
    for copy in copies:
        source, target = moves.setdefault(copy.group, ([], []))
        source.append(copy.src)
        target.append(copy.dst)
    return [(group, *move) for group, move in moves.items()]


def least_seconds(run: Callable[[], object]) -> float:
    """Return the least time of a few runs: disturbances only make a run longer. The first run loads kernels."""
    times: list[float] = []
    while len(times) < 2 or (len(times) < 5 and sum(times) < 1):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)
