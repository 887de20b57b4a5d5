"""Measured times of all-reduces by machine, number of devices and bytes (data/collectives.json, with sources)."""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Mapping
from functools import cache
from importlib.resources import files

from ridgeline.spec.hardware import Link

# Where nobody measured: seconds of a kernel that waits for other devices, and the share of the link that it reaches.
START_S, SHARE = 8e-6, 0.5

Points = tuple[tuple[int, ...], tuple[float, ...]]  # bytes, ascending, and microseconds


def all_reduce_s(machine: str, devices: int, size: float, link: Link | None) -> float:
    """Return the expected seconds of an all-reduce of `size` bytes over `devices` devices.

    Between two measured sizes, the time follows a straight line; beyond the last one it grows with the bytes. For
    another number of devices, that of the nearest measured one counts. A machine without measurements takes START_S and
    reaches SHARE of its link.
    """
    table = _tables().get(machine)
    if table is None:
        sent = 2 * (devices - 1) / devices * size
        return START_S + (sent / (SHARE * link.bytes_per_s) if link else 0.0)
    sizes, times = table[min(table, key=lambda known: (abs(known - devices), known))]
    if size >= sizes[-1]:
        return times[-1] * 1e-6 * size / sizes[-1]
    i = bisect_left(sizes, size)
    if i == 0:
        return times[0] * 1e-6
    share = (size - sizes[i - 1]) / (sizes[i] - sizes[i - 1])
    return 1e-6 * (times[i - 1] + share * (times[i] - times[i - 1]))


@cache
def _tables() -> Mapping[str, Mapping[int, Points]]:
    found: dict[str, dict[int, Points]] = {}
    for row in json.loads(files("ridgeline.cost").joinpath("data", "collectives.json").read_text(encoding="utf-8"))[
        "rows"
    ]:
        found.setdefault(row["machine"], {})[row["devices"]] = tuple(row["bytes"]), tuple(row["us"])
    return found
