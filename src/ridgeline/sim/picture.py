"""A run, simulated or measured, as a picture: latencies over time and how they spread, batch and queue, memory.

Drawing needs matplotlib, an extra: pip install ridgeline[plot]. No pyplot, so nothing global is touched.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ridgeline.errors import RequestError
from ridgeline.plan.limits import Slo
from ridgeline.sim.book import BUCKETS, Run, Timeline
from ridgeline.sim.metrics import SECOND, Answered

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SIZE_INCHES, DPI = (13.0, 8.6), 130
TTFT, TPOT, E2E, RUN, WAIT, LIMIT = "#d62728", "#1f77b4", "#2ca02c", "#1f77b4", "#e8a010", "#555555"
BINS = 48  # of time, for percentiles
POINTS = 1000  # of a curve
GIGA = 1e9

Floats = np.ndarray[Any, np.dtype[np.float64]]


def draw(title: str, run: Run, path: str) -> None:
    """Draw a run into a PNG or an SVG. Raises RequestError for another ending, a folder that cannot be written,
    and where matplotlib is not installed.
    """
    out = Path(path)
    if out.suffix not in (".png", ".svg"):
        raise RequestError(f"--plot {path}: the name must end in .png or .svg")
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise RequestError("--plot needs matplotlib; pip install ridgeline[plot]") from None
    figure = Figure(figsize=SIZE_INCHES, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
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
    try:
        figure.savefig(out, dpi=DPI)
    except OSError as e:
        raise RequestError(f"--plot {path} cannot be written: {e.strerror}") from None


def _latencies(axes: Axes, answered: Answered, slo: Slo | None) -> None:
    """Median and 99th percentile over the time of arrival."""
    arrival = answered.arrival / SECOND
    edges = np.linspace(arrival.min(), arrival.max() + 1e-9, BINS + 1)
    place = np.searchsorted(edges, arrival, "right") - 1
    middles = (edges[1:] + edges[:-1]) / 2
    for name, values, color in (
        ("TTFT", (answered.first - answered.arrival) / SECOND, TTFT), ("TPOT", answered.tpot, TPOT),
    ):  # fmt: skip
        bins = [values[(place == b) & ~np.isnan(values)] for b in range(BINS)]
        for q, style in ((50, "-"), (99, ":")):
            line = [np.percentile(b, q) if len(b) else np.nan for b in bins]
            axes.plot(middles, np.array(line) * 1e3, style, color=color, label=f"{name} p{q}")
    for limit, color in ((slo and slo.ttft_s, TTFT), (slo and slo.tpot_s, TPOT)):
        if limit:
            axes.axhline(limit * 1e3, color=color, linestyle="--", linewidth=0.8, alpha=0.7)
    axes.set(
        yscale="log", xlabel="arrival, s", ylabel="ms", title="latency over time" + (", SLO dashed" if slo else "")
    )


def _spread(axes: Axes, answered: Answered) -> None:
    """Which share of requests is faster."""
    shares = np.linspace(0, 100, POINTS)
    for name, values, color in (
        ("TTFT", (answered.first - answered.arrival) / SECOND, TTFT),
        ("TPOT", answered.tpot, TPOT),
        ("end to end", (answered.last - answered.arrival) / SECOND, E2E),
    ):
        known = values[~np.isnan(values)]
        if len(known):
            axes.plot(np.percentile(known, shares) * 1e3, shares, color=color, label=name)
    axes.set(xscale="log", xlabel="ms", ylabel="% of requests", title="how latencies spread")


def _load(axes: Axes, run: Run) -> None:
    times, batch, waiting, _ = _timeline(run.timeline)
    many = " of all replicas" if run.report.replicas > 1 else ""
    axes.plot(times, batch, color=RUN, label=f"sequences in a step{many}")
    axes.plot(times, waiting, color=WAIT, label=f"waiting{many}")
    axes.set(xlabel="time, s", ylabel="requests", title="batch and queue", ylim=(0, None))


def _memory(axes: Axes, run: Run) -> None:
    times, _, _, used = _timeline(run.timeline)
    r = run.report
    axes.fill_between(times, used / GIGA, color=E2E, alpha=0.5, linewidth=0, label="pages in use, mean")
    axes.axhline(r.state_bytes * r.replicas / GIGA, color=LIMIT, linestyle="--", label="all pages")
    axes.set(xlabel="time, s", ylabel="GB", title="memory of the state", ylim=(0, None))


def _timeline(timeline: Timeline) -> tuple[Floats, Floats, Floats, Floats]:
    """Seconds, and means over each bucket: sequences in a step, waiting, bytes in use; sums over replicas."""
    sums = np.array(timeline.sums or [[0] * 4], np.float64)
    times = (np.arange(len(sums)) + 0.5) * timeline.width / SECOND
    means = sums[:, 1:] / timeline.width
    assert len(sums) <= BUCKETS
    return times, means[:, 0], means[:, 1], means[:, 2]
