"""Read the claims that the lab runs again, which are data: number, text, source and conditions."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class Claim:
    """A sentence of a lecture or a paper, in our words.

    source: where it is said. conditions: when it is said to hold; empty if nothing is said.
    """

    number: int
    text: str
    source: str
    conditions: str


@cache
def claims() -> Mapping[int, Claim]:
    """Return all claims by number."""
    entries = json.loads(files("ridgeline.lab").joinpath("claims.json").read_text(encoding="utf-8"))
    return MappingProxyType({e["number"]: Claim(**e) for e in entries})
