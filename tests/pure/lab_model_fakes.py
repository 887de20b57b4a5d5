"""Invented measurements of the lab's experiments on models and their quality."""

from __future__ import annotations

from lab_fakes import Faked

EXACT: tuple[str, ...] = ()
FAKED: dict[str, Faked] = {}
