"""Look up what an hour of a machine costs. Prices are data with a date and a source; a user's own price wins."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from ridgeline.catalog.machines import read_data


@dataclass(frozen=True, slots=True)
class Price:
    """Price of one device. date: the day on which the source was read, ISO 8601; empty for a user's own price."""

    dollars_per_hour: float
    source: str
    date: str = ""


def price_of(machine: str) -> Price | None:
    """Return the known price of a machine of the catalog; None if there is none."""
    return prices().get(machine)


@cache
def prices() -> Mapping[str, Price]:
    """Return all known prices by machine."""
    return {
        entry["machine"]: Price(entry["dollars_per_hour"], entry["source"], entry["date"])
        for entry in read_data("prices.json")
    }
