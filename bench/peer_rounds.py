"""Decide by the machine's own limits which rounds of a run count, and return the figures of those.

The limits are measured when a round begins and when it ends. If a virtual machine gets less of its processors for a
while, the peak falls, and every figure of the round falls with it. So a round counts only if both measurements of the
peak are at least `LEAST` of the highest one of the run. Memory may have two speeds, which depend on where the system
has put a program's data. So a round counts only if both measurements of reading differ by less from the median of the
run. Figures of programs decide nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import mean, median
from typing import Any

LEAST = 0.8
READ = "read_gb_s"
RULED = {READ: "memory was read at {:.1f} GB/s, usually at {:.1f}", "fp32_gflop_s": "{:.0f} of {:.0f} GFLOP/s"}
Line = Mapping[str, Any]


def limits_of_run(lines: Iterable[Line]) -> dict[str, float]:
    """Return the median of the read limits and the highest peaks that were measured in all rounds of some results."""
    found: dict[str, list[float]] = {}
    for measured in (m for line in lines for r in line.get("rounds", ()) for m in r.get("limits", ())):
        for name, value in measured.items():
            found.setdefault(name, []).append(value)
    return {name: median(values) if name == READ else max(values) for name, values in found.items()}


def reason(round_: Mapping[str, Any], run: Mapping[str, float]) -> str:
    """Return why a round does not count; "" if it does. run: its `limits_of_run`."""
    for name, text in RULED.items():
        for value in (limits[name] for limits in round_.get("limits", ()) if name in limits):
            most = run[name] / LEAST if name == READ else float("inf")
            if not LEAST * run[name] <= value <= most:
                return text.format(value, run[name])
    return ""


def summary(line: Line, run: Mapping[str, float]) -> dict[str, Any]:
    """Return a result with the medians of its rounds that count as figures.

    `left_out` has the number of a round, beginning with 1, and the reason. `limits` has medians over rounds of the mean
    of both measurements. `read_share` and `peak_share` are medians of the ratio within a round.
    """
    reasons = [reason(r, run) for r in line.get("rounds", ())]
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
