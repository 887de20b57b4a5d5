"""The types of recurrent mixers as compositions: what they need of a table, and the three parts they are cut into."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from ridgeline.ops import api
from ridgeline.ops.api import Array, Weights

F = TypeVar("F", bound=Callable[..., Any])
Arrays = Sequence[Array]
Before = Callable[[Array], tuple[Arrays, Array]]  # (x [T, width]) -> what goes along, each [T, ...]; the gate
# (inputs, each [n, m, ...]; states, each [n, ...]; lengths [n]) -> y [n, m, inner], states
Along = Callable[[Arrays, Arrays, Array], tuple[Array, Arrays]]
After = Callable[[Array, Array], Array]  # (y [T, inner], the gate) -> [T, width]


class Primitives(Protocol):
    """What a composition needs of the table."""

    @property
    def memory(self) -> api.Memory: ...

    def primitive(self, op: api.Op[F], case: object = None) -> F: ...


class Ops(Primitives, Protocol):
    """What one of stages needs besides."""

    def stage(self, op: api.Op[F], case: object, weights: Weights) -> F: ...


Parts = tuple[Before, Along, After]
