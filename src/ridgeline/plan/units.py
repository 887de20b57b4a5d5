"""Format figures for plans: four digits and decimal units (1 GB is 10^9 bytes, as makers of memory count)."""

from __future__ import annotations

from collections.abc import Sequence


def decimal_bytes(count: float) -> str:
    """Format bytes: `14.48 GB`."""
    return _scaled(count, ("B", "kB", "MB", "GB", "TB", "PB"))


def flops(count: float) -> str:
    """Format operations: `2.06 TFLOP`."""
    return _scaled(count, ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP", "EFLOP"))


def seconds(value: float) -> str:
    """Format seconds: `4.89 ms`."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if abs(value) >= size:
            return f"{_digits(value / size)} {unit}"
    return f"{_digits(value / 1e-9)} ns" if value else "0 s"


def number(value: float) -> str:
    """Format a number: `2,689`, `13.4`."""
    return _digits(value)


def _scaled(count: float, units: Sequence[str]) -> str:
    for unit in units:
        if abs(count) < 999.95 or unit == units[-1]:
            break
        count /= 1000
    return f"{_digits(count)} {unit}"


def _digits(value: float) -> str:
    """Format with four significant digits and all digits before the point."""
    if value == 0 or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.{3 if abs(value) < 10 else 2 if abs(value) < 100 else 1}f}".rstrip("0").rstrip(".") or "0"
