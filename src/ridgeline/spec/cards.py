"""Read from the card of a draft model or a head how often its drafts were right.

The card is README.md. Its front matter has lines such as

    accepted_shares: [0.87, 0.8, 0.75, 0.71]
    rank_accuracies: [[0.52, 0.11, 0.05], [0.31, 0.09, 0.05]]

with the shares of verifications in which at least the first 1, 2, ... drafts were accepted, and for each head of a
Medusa model the shares of positions at which its best token, its second one, ... was right.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ridgeline.errors import CheckpointError
from ridgeline.spec.folders import MAX_CONFIG_BYTES, read_text

CARD, SHARES, ACCURACIES, FENCE = "README.md", "accepted_shares", "rank_accuracies", "---"
ROUNDING = 0.01  # by which the shares of a head's ranks may be above 1 together


def measured_acceptance(folder: Path) -> tuple[float, ...]:
    """Return the acceptance of a draft by depth if those before it were accepted; empty if the card does not say it.

    Raises CheckpointError for numbers that are no shares.
    """
    found = _field(folder, SHARES)
    if not _are_numbers(found):
        raise CheckpointError(f"{folder / CARD}: {SHARES} is {found!s:.100}; it must be a list of numbers")
    shares = tuple(map(float, found))
    if not all(0 <= b <= a <= 1 for a, b in zip((1.0, *shares), shares, strict=False)):
        raise CheckpointError(f"{folder / CARD}: {SHARES} is {list(shares)}; it must fall from at most 1 to at least 0")
    return tuple(b / a if a else 0.0 for a, b in zip((1.0, *shares), shares, strict=False))


def rank_accuracies(folder: Path) -> tuple[tuple[float, ...], ...]:
    """Return for each head of a Medusa model how often its token of each rank was right; () if the card does not say.

    Raises CheckpointError for numbers that are no shares.
    """
    found = _field(folder, ACCURACIES)
    if not isinstance(found, list) or not all(row and _are_numbers(row) for row in found):
        raise CheckpointError(
            f"{folder / CARD}: {ACCURACIES} is {found!s:.100}; it must be a list with a list of numbers for each head"
        )
    rows = tuple(tuple(map(float, row)) for row in found)
    if wrong := [row for row in rows if min(row) < 0 or not sum(row) <= 1 + ROUNDING]:
        raise CheckpointError(
            f"{folder / CARD}: {ACCURACIES} has {list(wrong[0])!s:.100}; the shares of a head must be at least 0, and "
            "at most 1 together"
        )
    return rows


def _field(folder: Path, field: str) -> Any:
    """Return the value of a field in the front matter of a folder's card; [] if it is not there."""
    card = folder / CARD
    try:
        lines = read_text(card, MAX_CONFIG_BYTES).split("\n")
    except (OSError, ValueError):
        return []
    if lines[0].rstrip() != FENCE:
        return []
    for line in lines[1:]:
        name, _, value = line.partition(":")
        if line.rstrip() == FENCE:
            break
        if name == field:
            try:
                return json.loads(value, parse_int=float)  # any number of digits
            except (ValueError, RecursionError):
                return value.strip()
    return []


def _are_numbers(found: Any) -> bool:
    return isinstance(found, list) and all(type(x) in (int, float) for x in found)
