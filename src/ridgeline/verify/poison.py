"""Fill new pages with wrong numbers: clean or reused memory may happen to hold what a wrong engine fails to write."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np

from ridgeline.ops.api import Array, Memory
from ridgeline.runtime.load import LoadedModel

# Every byte of a new page. The values are far from any key or value, so that reading them shows, and finite, so that
# 0 times a value is 0. As float32 and bfloat16 the value is 3.0e29, as float16 9,088, as int8 112 times 3.0e29, and as
# fp8 128 scales.
POISON = 0x70
BLOCK = 2**24  # bytes that are written at once, at least one page


def poisoned(loaded: LoadedModel) -> LoadedModel:
    """Return the same model and weights on a device whose new pages are filled with POISON."""
    table = copy.copy(loaded.table)
    table.memory = cast(Memory, _Poisoning(loaded.table.memory))
    return replace(loaded, table=table)


class _Poisoning:
    """A Memory that fills the new pages of another one."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory

    def __getattr__(self, name: str) -> Any:
        return getattr(self._memory, name)

    def pages(self, num_pages: int, num_bytes: int) -> Array:
        """Return new pages that are filled with POISON; arguments as for Memory.pages."""
        pages = self._memory.pages(num_pages, num_bytes)
        size = max(1, BLOCK // max(1, num_bytes))
        for first in range(0, num_pages, size):
            index: Sequence[int] = range(first, min(first + size, num_pages))
            self._memory.pages_in(pages, index, np.full((len(index), num_bytes), POISON, np.uint8))
        return pages
