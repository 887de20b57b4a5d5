"""Draw a server under load: latencies over time, their distribution, open requests, tokens per second.

Drawing needs matplotlib, an extra: pip install ridgeline[plot]. It does not use pyplot, which has global state.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ridgeline.measure.client import Answer
from ridgeline.measure.load import Measured
from ridgeline.plan.limits import Slo
from ridgeline.plan.picture import keep, new_figure
from ridgeline.sim.metrics import SECOND

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SIZE_INCHES = (13.0, 8.6)
TTFT, TPOT, E2E, LIMIT = "#d62728", "#1f77b4", "#2ca02c", "#555555"
BINS = 60  # time bins of a picture


def check_name(path: str) -> None:
    """Raise RequestError if a picture of this name cannot be drawn. Call this before the measurement."""
    new_figure(path, SIZE_INCHES)


def draw(title: str, found: Measured, path: str) -> None:
    """Draw a run into a PNG or an SVG. Raises RequestError for a folder that cannot be written."""
    figure = new_figure(path, SIZE_INCHES)
    times, spread, load, tokens = figure.subplots(2, 2).flat
    good = [a for a in found.answers if a.error is None]
    start = min(a.arrival_ns for a in found.answers)
    _latencies(times, good, start, found)
    _spread(spread, good, found)
    _load(load, good, start)
    _tokens(tokens, good, start)
    for axes in (times, spread, load, tokens):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    for axes in (times, spread, load):
        axes.legend(fontsize=9, framealpha=0.85, edgecolor="none")
    figure.suptitle(title, x=0.01, ha="left", fontsize=14, fontweight="bold")
    keep(figure, path)


def _ttft(answer: Answer) -> float:
    return (answer.times_ns[0] - answer.arrival_ns) / SECOND


def _tpot(answer: Answer) -> float | None:
    return (answer.times_ns[-1] - answer.times_ns[0]) / (answer.tokens - 1) / SECOND if answer.tokens > 1 else None


def _limits(found: Measured) -> list[tuple[float | None, str]]:
    slo = found.report.slo or Slo()
    return [(slo.ttft_s, TTFT), (slo.tpot_s, TPOT), (slo.e2e_s, E2E)]


def _latencies(axes: Axes, good: list[Answer], start: int, found: Measured) -> None:
    due = [(a.arrival_ns - start) / SECOND for a in good]
    axes.scatter(due, [_ttft(a) for a in good], s=12, color=TTFT, alpha=0.7, label="TTFT")
    pairs = [(at, value) for at, a in zip(due, good, strict=True) if (value := _tpot(a)) is not None]
    if pairs:
        axes.scatter([at for at, _ in pairs], [value for _, value in pairs], s=12, color=TPOT, alpha=0.7, label="TPOT")
    for limit, color in _limits(found):
        if limit:
            axes.axhline(limit, color=color, linestyle="--", linewidth=1)
    axes.set(
        title="Latency of each request (dashed: SLO)",
        xlabel="time at which it was due, s",
        ylabel="seconds",
        yscale="log",
    )


def _spread(axes: Axes, good: list[Answer], found: Measured) -> None:
    series: list[tuple[str, str, list[float]]] = [
        ("TTFT", TTFT, [_ttft(a) for a in good]),
        ("TPOT", TPOT, [value for a in good if (value := _tpot(a)) is not None]),
        ("end to end", E2E, [(a.times_ns[-1] - a.arrival_ns) / SECOND for a in good]),
    ]
    for name, color, values in series:
        if values:
            axes.plot(np.sort(values), 100 * np.arange(1, len(values) + 1) / len(values), color=color, label=name)
    for limit, color in _limits(found):
        if limit:
            axes.axvline(limit, color=color, linestyle="--", linewidth=1)
    axes.set(title="Distribution of latencies", xlabel="seconds", ylabel="% of requests at most", xscale="log")


def _load(axes: Axes, good: list[Answer], start: int) -> None:
    for name, color, place in (("open", E2E, -1), ("without a first token", TTFT, 0)):
        events = sorted([(a.arrival_ns, 1) for a in good] + [(a.times_ns[place], -1) for a in good])
        at = [(time - start) / SECOND for time, _ in events]
        axes.step(at, np.cumsum([step for _, step in events]), where="post", color=color, label=name)
    axes.set(title="Requests", xlabel="seconds", ylabel="number of requests")


def _tokens(axes: Axes, good: list[Answer], start: int) -> None:
    times: Any = np.array([(t - start) / SECOND for a in good for t in a.times_ns])
    counts, edges = np.histogram(times, BINS)
    axes.stairs(counts / np.diff(edges), edges, color=TPOT, fill=True, alpha=0.5)
    axes.set(title="Tokens out", xlabel="seconds", ylabel="tokens/s")
