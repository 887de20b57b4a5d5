"""Orders that rank 0 gives the other ranks of a model that is cut, as plain data.

A StepPlan whose tokens are all known is an order too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from ridgeline.runtime.layout import Ints
from ridgeline.sched.work import Result, Work
from ridgeline.spec.groups import StateGroup


class Open(NamedTuple):
    """Make the runner of an engine. options: arguments of DeviceRunner by name."""

    groups: Sequence[StateGroup]
    num_pages: Sequence[int]
    options: Mapping[str, Any]


class Project(NamedTuple):
    """Compute logits of some rows of the last step. rows: None for all of them."""

    rows: Ints | None


class Settle(NamedTuple):
    """Move the rows of accepted drafts of trees."""

    works: Sequence[Work]
    results: Sequence[Result]


class Probe(NamedTuple):
    """Compute the prompt that is timed."""


Tell = Callable[[object], object]


def tell_nobody(order: object) -> None:
    """Tell nobody: there is one rank."""
