"""Decide by the machine's own limits which rounds of a run count, and return the figures of those.

The limits are measured when a round begins and when it ends. If a virtual machine gets less of its processors or of the
memory for a while, its limits fall, and every figure of the round falls with them. So a round counts only if the lower
of both measurements is at least `LEAST` of the highest one of the run, for each limit of `RULED`. Figures of programs
decide nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import mean, median
from typing import Any

LEAST = 0.8
RULED = {"read_gb_s": "memory was read at {:.1f} of {:.1f} GB/s", "fp32_gflop_s": "{:.0f} of {:.0f} GFLOP/s"}
Line = Mapping[str, Any]


def best_limits(lines: Iterable[Line]) -> dict[str, float]:
    """Return the highest measured limits over all rounds of some results."""
    best: dict[str, float] = {}
    for measured in (m for line in lines for r in line.get("rounds", ()) for m in r.get("limits", ())):
        for name, value in measured.items():
            best[name] = max(value, best.get(name, 0.0))
    return best


def reason(round_: Mapping[str, Any], best: Mapping[str, float]) -> str:
    """Return why a round does not count; "" if it does."""
    for name, text in RULED.items():
        measured = [limits[name] for limits in round_.get("limits", ()) if name in limits]
        if measured and min(measured) < LEAST * best[name]:
            return text.format(min(measured), best[name])
    return ""


def summary(line: Line, best: Mapping[str, float]) -> dict[str, Any]:
    """Return a result with the medians of its rounds that count as figures.

    `left_out` has the number of a round, beginning with 1, and the reason. `limits` has medians over rounds of the mean
    of both measurements. `read_share` and `peak_share` are medians of the ratio within a round.
    """
    reasons = [reason(r, best) for r in line.get("rounds", ())]
    kept = [r for r, why in zip(line.get("rounds", ()), reasons, strict=True) if not why]
    shares = [figures(line, r) for r in kept]
    found = {name: median(f[name] for f in shares) for name in (shares[0] if shares else ())}
    limits = [limits_of(r) for r in kept if r.get("limits")]
    if limits:
        found["limits"] = {name: median(each[name] for each in limits) for name in limits[0]}
    left_out = {number: why for number, why in enumerate(reasons, 1) if why}
    return {**line, **found, "left_out": left_out, "count": len(kept)}


def figures(line: Line, round_: Mapping[str, Any]) -> dict[str, float]:
    """Return the figures of one round, with its shares of the limits."""
    found = {name: value for name, value in round_.items() if name != "limits"}
    if round_.get("limits"):
        limits = limits_of(round_)
        if "read_bytes" in line:
            found["read_share"] = found["tokens_per_s"] * line["read_bytes"] / 1e9 / limits["read_gb_s"]
        if "operations" in line:
            found["peak_share"] = found["tokens_per_s"] * line["operations"] / 1e9 / limits[line["peak"]]
    return found


def limits_of(round_: Mapping[str, Any]) -> dict[str, float]:
    measured: Sequence[Mapping[str, float]] = round_["limits"]
    return {name: mean(m[name] for m in measured) for name in measured[0]}
