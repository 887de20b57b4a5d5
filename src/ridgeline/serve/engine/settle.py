"""Prepare a process for its work, once after its start."""

from __future__ import annotations

import gc


def settle() -> None:
    """Exclude all present objects from garbage collection, which would otherwise delay tokens."""
    gc.collect()
    gc.freeze()
