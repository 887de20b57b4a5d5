"""The bytes behind the pages: one buffer per state group, page-major, each layer's view of it, and its host twin."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ridgeline.ops.api import Array, Memory
from ridgeline.runtime.ahead import Ahead
from ridgeline.spec.groups import StateGroup

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
MOVE_BYTES = 2**24  # of pages that are on their way at once, unless one page is larger (plan.memory counts them)


class Arena:
    """Pages of all state groups, on the device and, for swapping, on the host.

    A page holds page_tokens tokens of every layer of its group: per layer the parts of its state, one after the other,
    each [page_tokens, *shape]; of a snapshot group one state of every layer. Whole pages are bytes. Contents are
    undefined until a step writes them; page 0 of each group holds nothing.
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
            Ahead(np.asarray(pages), group.page_tokens)
            for group, pages in zip(groups, self._pages, strict=True)
            if memory.on_host
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
        """The buffers of all groups."""
        return self._pages

    def layer(self, index: int) -> tuple[int, tuple[Array, ...]]:
        """A layer's group, and its state's parts: views [pages, page_tokens, *shape], of a snapshot [pages, *shape]."""
        return self._views[index]

    def handed_out(self, group: int, pages: Sequence[int]) -> None:
        """A step is about to use these pages; some were never used before."""
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
        """As many pages at a time as MOVE_BYTES hold, at least one: a whole sequence may be on its way."""
        size = max(1, MOVE_BYTES // self._pages[group].shape[1])
        for i in range(0, len(source), size):
            yield list(source[i : i + size]), list(target[i : i + size])
