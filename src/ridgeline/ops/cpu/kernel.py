"""How a kernel is named to the backend."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from ridgeline._kernels import Pool
from ridgeline.ops.api import Op


class Kernel(NamedTuple):
    """A primitive: for which cases there is no kernel, and why; the kernel of a case."""

    refuses: Callable[[Any], str | None]
    make: Callable[[Any, Pool], Callable[..., Any]]


Kernels = Mapping[Op[Any], Kernel]


def never(case: object) -> None:
    """There is nothing that the kernel cannot serve."""
    return


def empty(pool: Pool, *shape: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Room for a result; contents undefined. Kernels that may be written down (record.py) take theirs from here."""
    return pool.room(shape) if pool.recording else np.empty(shape, np.float32)
