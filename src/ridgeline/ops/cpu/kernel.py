"""How a primitive is registered with the cpu backend."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from ridgeline._kernels import Pool
from ridgeline.ops.api import Op


class Kernel(NamedTuple):
    """A primitive: why a case has no kernel, or None; and a function that makes the kernel of a case."""

    refuses: Callable[[Any], str | None]
    make: Callable[[Any, Pool], Callable[..., Any]]


Kernels = Mapping[Op[Any], Kernel]


def never(case: object) -> None:
    """Refuse nothing: the kernel serves every case."""
    return


def empty(pool: Pool, *shape: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Return memory for a result; its contents are undefined. Kernels that can be recorded (record.py) call this."""
    return pool.room(shape) if pool.recording else np.empty(shape, np.float32)


def integers(pool: Pool, *shape: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return memory for integers, as `empty` does for floats."""
    return empty(pool, *shape, 2).view(np.int64).reshape(shape)
