"""The memory of pages: a page-major buffer per state group, each layer's view of it, and a buffer on the host."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from ridgeline.ops.api import Array, Memory
from ridgeline.runtime.ahead import Ahead
from ridgeline.spec.groups import StateGroup

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
MOVE_BYTES = 2**24  # pages are moved in blocks of so many bytes, at least one page (cost/memory.py counts them)


class Layers(Protocol):
    """The pages that hold the state of a model's layers."""

    @property
    def pages(self) -> Sequence[Array]:
        """Return the buffer of each group, [num_pages, page_bytes]."""
        ...

    def layer(self, index: int) -> tuple[int, tuple[Array, ...]]:
        """Return a layer's group and its state's views, [pages, page_tokens, *shape]; of snapshots [pages, *shape]."""
        ...


class Arena:
    """Holds the pages of all state groups, on the device and, for swapping, on the host.

    A page holds page_tokens tokens of every layer of its group: for each layer the parts of its state, one after the
    other, each [page_tokens, *shape]. A page of a snapshot group holds one state of every layer. Contents are undefined
    until a step writes them; page 0 of each group holds nothing.
    """

    def __init__(
        self,
        groups: Sequence[StateGroup],
        num_pages: Sequence[int],
        num_host_pages: Sequence[int],
        memory: Memory,
    ) -> None:
        self._memory = memory
        sizes = [group.page_bytes for group in groups]
        self._pages = [memory.pages(n, size) for n, size in zip(num_pages, sizes, strict=True)]
        self._ahead = [
            Ahead(np.asarray(pages), group) for group, pages in zip(groups, self._pages, strict=True) if memory.on_host
        ]
        self._host = [np.empty((n, size), np.uint8) for n, size in zip(num_host_pages, sizes, strict=True)]
        self._views: dict[int, tuple[int, tuple[Array, ...]]] = {}
        for g, group in enumerate(groups):
            tokens = () if group.snapshot else (group.page_tokens,)
            for slot in group.slots:
                parts = ((p.offset, (*tokens, *p.shape), p.dtype) for p in slot.parts)
                self._views[slot.layer] = g, tuple(memory.page_view(self._pages[g], *part) for part in parts)

    @property
    def pages(self) -> Sequence[Array]:
        """Return the buffer of each group, [num_pages, page_bytes]."""
        return self._pages

    def layer(self, index: int) -> tuple[int, tuple[Array, ...]]:
        """Return a layer's group and its state's views, [pages, page_tokens, *shape]; of snapshots [pages, *shape]."""
        return self._views[index]

    @property
    def resident_pages(self) -> tuple[int, ...]:
        """Return the number of pages of each group that have memory: on a host those used or touched, else all."""
        if self._memory.on_host:
            return tuple(ahead.num_resident for ahead in self._ahead)
        return tuple(pages.shape[0] for pages in self._pages)

    def handed_out(self, group: int, pages: Sequence[int]) -> None:
        """Prepare for a step that uses these pages; some may never have been used before."""
        if self._ahead:
            self._ahead[group].handed_out(pages)

    def copy(self, group: int, source: Sequence[int], target: Sequence[int]) -> None:
        """Copy pages onto others on the device."""
        for sources, targets in self._blocks(group, source, target):
            self._memory.copy_pages(self._pages[group], sources, targets)

    def overwrite(self, group: int, pages: Sequence[int], contents: Bytes) -> None:
        """Give each of the pages the same bytes."""
        for page in pages:
            self._memory.pages_in(self._pages[group], [page], contents[None])

    def swap_out(self, group: int, pages: Sequence[int], host: Sequence[int]) -> None:
        """Copy pages to host pages."""
        for sources, targets in self._blocks(group, pages, host):
            self._host[group][targets] = self._memory.pages_out(self._pages[group], sources)

    def swap_in(self, group: int, host: Sequence[int], pages: Sequence[int]) -> None:
        """Copy host pages back to pages."""
        for sources, targets in self._blocks(group, host, pages):
            data: np.ndarray[Any, Any] = self._host[group][sources]
            self._memory.pages_in(self._pages[group], targets, data)

    def _blocks(
        self, group: int, source: Sequence[int], target: Sequence[int]
    ) -> Iterator[tuple[list[int], list[int]]]:
        """Yield source and target pages in blocks of MOVE_BYTES, at least one page each."""
        size = max(1, MOVE_BYTES // self._pages[group].shape[1])
        for i in range(0, len(source), size):
            yield list(source[i : i + size]), list(target[i : i + size])


class ArenaPart:
    """Shows the layers of an arena from number `first` on as layers 0, 1, ... of another model.

    groups: indices of the groups that hold them; `layer` counts these groups only.
    """

    def __init__(self, arena: Arena, groups: Sequence[StateGroup], first: int) -> None:
        self._arena, self._first = arena, first
        self.groups = [g for g, group in enumerate(groups) if any(slot.layer >= first for slot in group.slots)]

    @property
    def pages(self) -> Sequence[Array]:
        """Return the buffer of each group."""
        return [self._arena.pages[g] for g in self.groups]

    def layer(self, index: int) -> tuple[int, tuple[Array, ...]]:
        """Return a layer's group and the views of its state."""
        group, views = self._arena.layer(self._first + index)
        return self.groups.index(group), views
