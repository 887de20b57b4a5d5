"""Parse latency limits of requests (SLOs), for plans, simulations and measurements."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from ridgeline.errors import RequestError

UNITS: Mapping[str, float] = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
NAMES = ("ttft", "tpot", "e2e")


@dataclass(frozen=True, slots=True)
class Slo:
    """Latency limits in seconds: time to first token, time per output token, end to end. None: no limit."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None

    @property
    def limits(self) -> dict[str, float]:
        """Return the limits that are set, by name."""
        return {name: limit for name in NAMES if (limit := getattr(self, f"{name}_s")) is not None}

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse `ttft=200ms,tpot=30ms`. Raises RequestError for anything else."""
        found: dict[str, float] = {}
        for part in text.split(","):
            name, _, value = part.strip().partition("=")
            limit = _seconds(value)
            if name not in NAMES or f"{name}_s" in found or not 0 < limit < float("inf"):
                raise RequestError(
                    f"--slo {part!r}: write NAME=TIME with {', '.join(NAMES)}, each once, and us, ms or s, "
                    "as in ttft=200ms"
                )
            found[f"{name}_s"] = limit
        return cls(**found)


def parse_time(flag: str, text: str) -> float:
    """Parse a time with its unit, such as 200ms. Raises RequestError for anything else."""
    found = _seconds(text)
    is_zero = "0" in text and text.strip("0.") in UNITS
    if not 0 <= found < float("inf") or (found == 0 and not is_zero):
        raise RequestError(f"{flag} is {text!r:.40}; write a time with us, ms or s, as in 200ms")
    return found


def _seconds(value: str) -> float:
    """Parse a time with its unit; return 0 if it is malformed."""
    unit = next((u for u in UNITS if value.endswith(u)), None)
    try:
        return float(value.removesuffix(unit)) * UNITS[unit] if unit else 0.0
    except ValueError:
        return 0.0
