"""Pages that are not clean: memory that was used before may hold just what a wrong engine fails to write."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np

from ridgeline.ops.api import Array, Memory
from ridgeline.runtime.load import LoadedModel

# Every byte: far from any key or value, so that reading it shows; a number, so that what is multiplied by 0 is 0. As
# float32 and bfloat16 it is 1.4e10, as float16 34.5, and as int8 80 times 1.4e10.
SOIL = 0x50
BLOCK = 2**24  # bytes that are written at once, unless one page has more


def poisoned(loaded: LoadedModel) -> LoadedModel:
    """The same model and weights, on a device whose new pages are full of SOIL."""
    table = copy.copy(loaded.table)
    table.memory = cast(Memory, _Soiling(loaded.table.memory))
    return replace(loaded, table=table)


class _Soiling:
    """A Memory that is another one but for its new pages."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory

    def __getattr__(self, name: str) -> Any:
        return getattr(self._memory, name)

    def pages(self, num_pages: int, num_bytes: int) -> Array:
        """As Memory.pages."""
        pages = self._memory.pages(num_pages, num_bytes)
        size = max(1, BLOCK // max(1, num_bytes))
        for first in range(0, num_pages, size):
            index: Sequence[int] = range(first, min(first + size, num_pages))
            self._memory.pages_in(pages, index, np.full((len(index), num_bytes), SOIL, np.uint8))
        return pages
