"""Draw a run, simulated or measured: latencies over time, their distribution, batch and queue, memory.

Drawing needs matplotlib, an extra: pip install ridgeline[plot]. It does not use pyplot, which has global state.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ridgeline.plan.limits import Slo
from ridgeline.plan.picture import keep, new_figure
from ridgeline.plan.units import decimal_bytes
from ridgeline.sim.book import Run
from ridgeline.sim.metrics import SECOND, Answered

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SIZE_INCHES = (13.0, 8.6)
TTFT, TPOT, E2E, RUN, WAIT, LIMIT = "#d62728", "#1f77b4", "#2ca02c", "#1f77b4", "#e8a010", "#555555"
BINS, BIN_REQUESTS = 48, 8  # intervals of time for percentiles: most of them, least mean requests in each
POINTS = 1000  # points of a curve
FAR = 20  # a limit above so many times the memory in use is not drawn


def draw(title: str, run: Run, path: str) -> None:
    """Draw a run into a PNG or SVG file.

    Raises RequestError for another file type, a folder that cannot be written, and if matplotlib is not installed.
    """
    figure = new_figure(path, SIZE_INCHES)
    latencies, spread, load, memory = figure.subplots(2, 2).flat
    _latencies(latencies, run.answered, run.report.slo)
    _spread(spread, run.answered)
    _load(load, run)
    _memory(memory, run)
    for axes in (latencies, spread, load, memory):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(fontsize=9, framealpha=0.85, edgecolor="none")
    figure.suptitle(title, x=0.01, ha="left", fontsize=14, fontweight="bold")
    keep(figure, path)


def _latencies(axes: Axes, answered: Answered, slo: Slo | None) -> None:
    """Draw the median and the 99th percentile over the time of arrival."""
    arrival = answered.arrival / SECOND
    count = min(max(len(arrival) // BIN_REQUESTS, 1), BINS)
    edges = np.linspace(arrival.min(), arrival.max() + 1e-9, count + 1)
    bin_of = np.searchsorted(edges, arrival, "right") - 1
    middles = (edges[1:] + edges[:-1]) / 2
    for name, values, color in (
        ("TTFT", (answered.first - answered.arrival) / SECOND, TTFT), ("TPOT", answered.tpot, TPOT),
    ):  # fmt: skip
        bins = [values[(bin_of == b) & ~np.isnan(values)] for b in range(count)]
        for q, style in ((50, "-"), (99, ":")):
            line = [np.percentile(b, q) if len(b) else np.nan for b in bins]
            axes.plot(
                middles,
                np.array(line) * 1e3,
                style,
                marker="." if count < BINS else "",
                color=color,
                label=f"{name} p{q}",
            )
    for limit, color in ((slo and slo.ttft_s, TTFT), (slo and slo.tpot_s, TPOT)):
        if limit:
            axes.axhline(limit * 1e3, color=color, linestyle="--", linewidth=0.8, alpha=0.7)
    axes.set(
        yscale="log", xlabel="arrival, s", ylabel="ms", title="latency over time" + (", SLO dashed" if slo else "")
    )


def _spread(axes: Axes, answered: Answered) -> None:
    """Draw the share of requests that are faster than each latency."""
    shares = np.linspace(0, 100, POINTS)
    for name, values, color in (
        ("TTFT", (answered.first - answered.arrival) / SECOND, TTFT),
        ("TPOT", answered.tpot, TPOT),
        ("end to end", (answered.last - answered.arrival) / SECOND, E2E),
    ):
        known = values[~np.isnan(values)]
        if len(known):
            axes.plot(np.percentile(known, shares) * 1e3, shares, color=color, label=name)
    axes.set(xscale="log", xlabel="ms", ylabel="% of requests", title="distribution of latencies")


def _load(axes: Axes, run: Run) -> None:
    found = run.timeline.columns()
    many = " of all replicas" if run.report.replicas > 1 else ""
    axes.plot(found["time_s"], found["batch"], color=RUN, label=f"sequences in a step{many}")
    axes.plot(found["time_s"], found["waiting"], color=WAIT, label=f"waiting{many}")
    axes.set(xlabel="time, s", ylabel="requests", title="batch and queue", ylim=(0, None))


def _memory(axes: Axes, run: Run) -> None:
    found = run.timeline.columns()
    times, used = found["time_s"], np.array(found["used_bytes"])
    r = run.report
    whole = r.state_bytes * r.replicas
    is_near = FAR * used.max() >= whole  # else the limit would flatten the curve
    unit, size = ("GB", 1e9) if (whole if is_near else used.max()) >= 1e9 else ("MB", 1e6)
    axes.fill_between(times, used / size, color=E2E, alpha=0.5, linewidth=0, label="pages in use, mean")
    if is_near:
        axes.axhline(whole / size, color=LIMIT, linestyle="--", label="all pages")
    title = "memory of the state" if is_near else f"memory of the state, of {decimal_bytes(whole)} in all"
    axes.set(xlabel="time, s", ylabel=unit, title=title, ylim=(0, None))
