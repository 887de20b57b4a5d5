"""Draw a plan: the roofline with every operation, latency against throughput, memory, and decode time by cause.

This needs matplotlib, an optional dependency: pip install ridgeline[plot]. pyplot is not used, because it has global
state.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ridgeline.cost.roofline import BOUNDS, StepTime
from ridgeline.errors import RequestError
from ridgeline.plan.planner import Load, Planner, batch_sizes
from ridgeline.plan.report import largest_chunk
from ridgeline.plan.units import number, seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SIZE_INCHES, DPI = (14.0, 10.0), 130
DECODE, PREFILL, QUIET = "#1f77b4", "#d62728", "#555555"
COLORS = {
    "compute": "#d62728", "weights": "#1f77b4", "state": "#2ca02c", "activations": "#e8a010", "link": "#9467bd",
    "overhead": "#7f7f7f",
}  # fmt: skip
MEMORY = {
    "weights": "#1f77b4", "state, by formula": "#2ca02c", "page slack": "#98df8a", "activations": "#e8a010",
    "logits": "#8c564b", "reserve": "#c7c7c7",
}  # fmt: skip
CLOSE = 4.0  # operations whose intensities differ by less than this factor share one label
LEAST_SHARE = 0.01  # share of a step; a faster operation gets a point but no label
ROOM = 4  # the curves reach this many times the larger of the largest batch and the knee
MOST_BATCH = 1 << 13


def draw(name: str, planner: Planner, load: Load, path: str) -> None:
    """Draw a plan into a PNG or an SVG. Raises RequestError for another file ending, if the file cannot be written, and
    if matplotlib is not installed.
    """
    figure = new_figure(path, SIZE_INCHES)
    roof, curve, memory, causes = figure.subplots(2, 2).flat
    wall = planner.memory.largest_batch(load.context)
    knee = planner.knee(load)
    sizes = batch_sizes(min(max(ROOM * max(wall, 1), ROOM * knee, 8), MOST_BATCH))
    _roofline(roof, planner, load)
    _trade(curve, planner, load, sizes, wall, knee)
    _memory(memory, planner, load, sizes, wall)
    _causes(causes, planner, load, sizes, wall)
    d = planner.deployment
    scheme = "".join(f", {n} {v}" for n in ("tp", "ep", "pp", "replicas") if (v := getattr(d.scheme, n)) > 1)
    title = f"{name} on {d.hardware.name}{scheme}: {d.precision.weights} weights, {d.precision.state} state, "
    figure.suptitle(f"{title}{load.context:,} tokens of context", x=0.01, ha="left", fontsize=15, fontweight="bold")
    keep(figure, path)


def new_figure(path: str, size_inches: tuple[float, float]) -> Figure:
    """Return an empty figure. Raises RequestError for a file ending other than .png or .svg, and if matplotlib is
    missing.
    """
    if Path(path).suffix not in (".png", ".svg"):
        raise RequestError(f"--plot {path}: the name must end in .png or .svg")
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise RequestError("--plot needs matplotlib; pip install ridgeline[plot]") from None
    figure = Figure(figsize=size_inches, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def keep(figure: Figure, path: str) -> None:
    """Write the figure, completely or not at all. Raises RequestError if that fails."""
    target = Path(path)
    beside = target.with_name(f".{target.stem}.{os.getpid()}{target.suffix}")
    try:
        try:
            figure.savefig(beside, dpi=DPI)
            beside.replace(target)
        finally:
            beside.unlink(missing_ok=True)
    except OSError as e:
        raise RequestError(f"--plot {path} cannot be written: {e.strerror}") from None


def _roofline(axes: Axes, planner: Planner, load: Load) -> None:
    hardware = planner.deployment.hardware
    steps = {
        f"decode, batch {load.batch:,}": (planner.decode(load.batch, load.context), "o", DECODE),
        f"prefill, a chunk of {min(planner.deployment.chunk, load.prompt):,}": (
            largest_chunk(planner, load.prompt), "^", PREFILL,
        ),
    }  # fmt: skip
    points = [t.operation for step, _, _ in steps.values() for t in step.operations if t.operation.flops]
    low = min(op.intensity for op in points) / 20
    high = 30 * max(hardware.ridge("float16"), *(op.intensity for op in points))
    for kind in dict.fromkeys(hardware.unit(op.compute) for op in points):
        peak, ridge = hardware.peak(kind) / 1e12, hardware.ridge(kind)
        axes.plot([low, ridge, high], [low * hardware.read_bytes_per_s / 1e12, peak, peak], color="black", lw=1.6)
        axes.annotate(
            f"{kind}: {number(peak)} TFLOP/s, ridge {number(ridge)} FLOP/B", (high, peak), xytext=(-4, 4),
            textcoords="offset points", ha="right", fontsize=9,
        )  # fmt: skip
    for label, (step, marker, color) in steps.items():
        _points(axes, step, marker, color, label)
    axes.set(xscale="log", yscale="log", xlabel="arithmetic intensity, FLOP per byte", xlim=(low, high))
    axes.set_ylabel("TFLOP/s at the roofline")
    axes.legend(loc="lower right", fontsize=9, frameon=False)
    _plain(axes, "Roofline: every operation; the area is its share of the time")


def _points(axes: Axes, step: StepTime, marker: str, color: str, label: str) -> None:
    """Draw every operation with arithmetic. Neighboring operations share a label, above or below the roofline."""
    shown = [t for t in step.operations if t.operation.flops]
    x = [t.operation.intensity for t in shown]
    y = [t.operation.flops * t.operation.layers / max(t.compute_s, t.memory_s) / 1e12 for t in shown]
    areas = [30 + 900 * t.seconds / step.seconds for t in shown]
    axes.scatter(x, y, s=areas, marker=marker, color=color, alpha=0.45, linewidths=0)
    axes.scatter([], [], s=60, marker=marker, color=color, alpha=0.6, label=f"{label}: {seconds(step.seconds)}")
    clusters: list[list[int]] = []
    for i in sorted(range(len(shown)), key=lambda i: x[i]):
        if shown[i].seconds < LEAST_SHARE * step.seconds:
            continue
        if clusters and x[i] < CLOSE * x[clusters[-1][0]]:
            clusters[-1].append(i)
        else:
            clusters.append([i])
    for cluster in clusters:
        cluster.sort(key=lambda i: -shown[i].seconds)
        names = "\n".join(f"{shown[i].operation.name} {shown[i].seconds / step.seconds:.0%}" for i in cluster)
        at = cluster[0]
        below = marker == "^"
        axes.annotate(
            names, (x[at], y[at]), xytext=(12, -8) if below else (-14, 10), textcoords="offset points", fontsize=8,
            ha="left" if below else "right", va="top" if below else "bottom", color=color,
        )  # fmt: skip


def _trade(axes: Axes, planner: Planner, load: Load, sizes: Sequence[int], wall: int, knee: int) -> None:
    replicas = planner.deployment.scheme.replicas

    def at(batch: int) -> tuple[float, float]:
        time = planner.token_s(batch, load.context)
        return replicas * batch / time, time * 1e3

    inside = [n for n in sizes if n <= wall]
    beyond = [wall, *(n for n in sizes if n > wall)] if wall else list(sizes)
    if inside:
        axes.plot(*zip(*(at(n) for n in [*inside, wall]), strict=True), "o-", color=DECODE, ms=4, lw=2)
    axes.plot(*zip(*(at(n) for n in beyond), strict=True), "o--", color=QUIET, ms=3, lw=1, alpha=0.6)
    for n in _labeled(sizes):
        axes.annotate(f"{n:,}", at(n), xytext=(5, -10), textcoords="offset points", fontsize=8, color=QUIET)
    axes.plot(*at(knee), "D", color="#e8710a", ms=9, label=f"knee: batch {knee:,}, {_pair(at(knee))}")
    if wall:
        axes.plot(*at(wall), "s", color=PREFILL, ms=9, label=f"memory is full: batch {wall:,}, {_pair(at(wall))}")
    axes.plot(*at(load.batch), "*", color="black", ms=12, label=f"--batch {load.batch:,}: {_pair(at(load.batch))}")
    axes.set(xscale="log", yscale="log", xlabel="total output tokens/s", ylabel="milliseconds per token of a request")
    axes.legend(loc="upper left", fontsize=9, frameon=False)
    _plain(axes, "Latency against throughput over the batch" + ("" if wall else ": one sequence does not fit"))
    _numbers(axes)


def _pair(point: tuple[float, float]) -> str:
    return f"{number(point[0])} tokens/s at {number(point[1])} ms"


def _labeled(sizes: Sequence[int]) -> list[int]:
    """Return the batch sizes to label: powers of four."""
    return [n for n in sizes if n & (n - 1) == 0 and n.bit_length() % 2 == 1]


def _memory(axes: Axes, planner: Planner, load: Load, sizes: Sequence[int], wall: int) -> None:
    top = planner.deployment.hardware.memory_bytes
    stacks: dict[str, list[float]] = {name: [] for name in MEMORY}
    for n in sizes:
        f = planner.memory.footprint(n, load.context)
        parts = (
            f.weight_bytes, f.formula_bytes, max(f.pages_bytes - f.formula_bytes, 0.0), f.activation_bytes,
            f.logits_bytes, f.reserve_bytes,
        )  # fmt: skip
        for name, value in zip(MEMORY, parts, strict=True):
            stacks[name].append(value / 1e9)
    axes.stackplot(sizes, *stacks.values(), labels=list(stacks), colors=list(MEMORY.values()), alpha=0.85)
    axes.axhline(top / 1e9, color="black", lw=1.6)
    axes.annotate(
        f"{top / 1e9:,.0f} GB", (sizes[0], top / 1e9), xytext=(4, 4), textcoords="offset points", fontsize=9
    )  # fmt: skip
    highest = max(1.35 * top, 1.2 * sum(stack[0] for stack in stacks.values()) * 1e9) / 1e9
    axes.set(xscale="log", xlabel="batch", ylabel="GB per device", xlim=(sizes[0], sizes[-1]), ylim=(0, highest))
    _wall(axes, wall)
    axes.legend(loc="upper left", fontsize=8, frameon=True, framealpha=0.85, edgecolor="none", ncols=2)
    _plain(axes, "Memory per device")
    _numbers(axes, y=False)


def _causes(axes: Axes, planner: Planner, load: Load, sizes: Sequence[int], wall: int) -> None:
    stacks: dict[str, list[float]] = {name: [] for name in BOUNDS}
    for n in sizes:
        step = planner.decode(n, load.context)
        for name, value in step.by_cause().items():
            stacks[name].append(100 * value / step.seconds)
    used = {name: values for name, values in stacks.items() if max(values) > 0}
    colors = [COLORS[name] for name in used]
    axes.stackplot(sizes, *used.values(), labels=list(used), colors=colors, alpha=0.85)
    axes.set(xscale="log", xlabel="batch", ylabel="% of a decode step", xlim=(sizes[0], sizes[-1]), ylim=(0, 100))
    _wall(axes, wall)
    axes.legend(loc="lower left", fontsize=9, frameon=True, framealpha=0.85, edgecolor="none")
    _plain(axes, "What limits a decode step")
    _numbers(axes, y=False)


def _wall(axes: Axes, wall: int) -> None:
    if wall:
        axes.axvline(wall, color=PREFILL, lw=1.2, ls=":")
        axes.annotate(
            f"full at {wall:,}", (wall, 0.97), xycoords=("data", "axes fraction"), xytext=(4, 0),
            textcoords="offset points", va="top", fontsize=9, color=PREFILL,
        )  # fmt: skip


def _numbers(axes: Axes, *, y: bool = True) -> None:
    """Label the axes with 1, 10, 100, 1,000 instead of powers."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    plain: Any = FuncFormatter(lambda value, _: f"{value:,g}")
    for axis in (axes.xaxis, axes.yaxis) if y else (axes.xaxis,):
        axis.set_major_formatter(plain)
        axis.set_minor_formatter(NullFormatter())
        if y:
            axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))


def _plain(axes: Axes, title: str) -> None:
    axes.set_title(title, loc="left", fontsize=11)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
