"""Mark the functions that a helper process may run, and find them by name."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])
_MARK = "__bounded_job__"


def job(function: F) -> F:
    """Allow helper processes to run a function of a module, under the name "module:function".

    It is called with the state that the pool's setup returned (None without a setup), then the arguments: bytes and
    JSON values. It returns one such value, or a tuple of several. The RidgelineErrors that it raises reach the caller.
    """
    setattr(function, _MARK, True)
    return function


def name_of(function: Callable[..., Any]) -> str:
    """Return the name under which helpers find a function. Raises ValueError if it is not marked with `job`."""
    if not getattr(function, _MARK, False):
        raise ValueError(f"{function.__qualname__} is not marked as a job")
    return f"{function.__module__}:{function.__qualname__}"


def find_job(name: str) -> Callable[..., Any]:
    """Return the function of a name. Raises ValueError if it is not marked with `job`."""
    module, _, function = name.partition(":")
    found = getattr(importlib.import_module(module), function)
    if not getattr(found, _MARK, False):
        raise ValueError(f"{name} is not marked as a job")
    return found  # type: ignore[no-any-return]
