"""Decide which cases of a long test run each day, and which at night."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest

# Windows and experts, latents, shared keys, recurrent layers beside others: most errors show in one of these.
ONE_OF_EACH = frozenset({"gpt_oss", "deepseek_v2", "cla_mixed", "jamba"})


def daily(names: Iterable[Any], chosen: Collection[Any], *, slow: bool = True) -> list[Any]:
    """Return the cases of a test: those in `chosen` belong to the slow half, the others to the nightly run.

    slow: False puts the chosen ones into the fast half. Raises ValueError for a chosen case that does not exist.
    """
    names = list(names)
    if missing := [name for name in chosen if name not in names]:
        raise ValueError(f"there are no cases {missing}")
    marks = {True: [pytest.mark.slow] if slow else [], False: [pytest.mark.nightly]}
    return [
        pytest.param(*(name if isinstance(name, tuple) else (name,)), marks=marks[name in chosen]) for name in names
    ]
