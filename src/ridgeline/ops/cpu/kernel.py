"""How a kernel is named to the backend."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

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
