"""What a process does once, between its start and its work."""

from __future__ import annotations

import gc


def settle() -> None:
    """What is there now stays: the garbage collector need not look through it again, while tokens wait."""
    gc.collect()
    gc.freeze()
