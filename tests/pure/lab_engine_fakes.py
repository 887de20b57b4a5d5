"""Invented measurements of the lab's experiments on the engine, the scheduler and the kernels."""

from __future__ import annotations

from lab_fakes import Faked

EXACT: tuple[str, ...] = ()
FAKED: dict[str, Faked] = {}
