"""Format parts of a spec, ranges and sizes as text."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any


def describe(part: object) -> str:
    """Return the part's kind and all fields that differ from the default: `Rope(dim=64, theta=500000)`."""
    if not is_dataclass(part) or isinstance(part, type):
        return _value(part)
    shown = [f"{f.name}={describe(item)}" for f in fields(part) if (item := getattr(part, f.name)) != f.default]
    return f"{type(part).__name__}({', '.join(shown)})"


def index_ranges(indices: list[int]) -> str:
    """Format ascending numbers as ranges: `0-4, 6-10, 12`."""
    ranges: list[list[int]] = []
    for i in indices:
        if ranges and ranges[-1][1] == i - 1:
            ranges[-1][1] = i
        else:
            ranges.append([i, i])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in ranges)


def num_bytes(count: float) -> str:
    """Format a number of bytes with a unit, in powers of 1024."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} TiB"


def _value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, tuple) and len(value) > 3:
        return f"[{_value(value[0])} .. {_value(value[-1])}]"
    return str(value)
