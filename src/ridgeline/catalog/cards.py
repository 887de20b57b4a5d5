"""Read from the card of a draft model or a head how often its drafts were accepted.

The card is README.md. Its front matter has a line such as

    accepted_shares: [0.87, 0.8, 0.75, 0.71]

with the shares of verifications in which at least the first 1, 2, ... drafts were accepted.
"""

from __future__ import annotations

import json
from pathlib import Path

from ridgeline.errors import CheckpointError
from ridgeline.spec.folders import MAX_CONFIG_BYTES, read_text

CARD, FIELD, FENCE = "README.md", "accepted_shares", "---"


def measured_acceptance(folder: Path) -> tuple[float, ...]:
    """Return the acceptance of a draft by depth if those before it were accepted; empty if the card does not say it.

    Raises CheckpointError for numbers that are no shares.
    """
    shares = _shares(folder / CARD)
    if not all(0 <= b <= a <= 1 for a, b in zip((1.0, *shares), shares, strict=False)):
        raise CheckpointError(f"{folder / CARD}: {FIELD} is {list(shares)}; it must fall from at most 1 to at least 0")
    return tuple(b / a if a else 0.0 for a, b in zip((1.0, *shares), shares, strict=False))


def _shares(card: Path) -> tuple[float, ...]:
    try:
        lines = read_text(card, MAX_CONFIG_BYTES).split("\n")
    except (OSError, ValueError):
        return ()
    if lines[0].rstrip() != FENCE:
        return ()
    for line in lines[1:]:
        name, _, value = line.partition(":")
        if line.rstrip() == FENCE:
            break
        if name == FIELD:
            return _numbers(card, value)
    return ()


def _numbers(card: Path, text: str) -> tuple[float, ...]:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, list) or not all(type(x) in (int, float) for x in found):
        raise CheckpointError(f"{card}: {FIELD} is {text.strip()!r:.100}; it must be a list of numbers")
    return tuple(map(float, found))
