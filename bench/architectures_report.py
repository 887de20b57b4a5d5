"""Draw the results of bench/architectures.py as two plots, and print them as a table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Line = Mapping[str, Any]
BASELINE = "MHA"
COLORS = (
    "#4b4b4b", "#1f77b4", "#17a2b8", "#d62728", "#9467bd", "#e8710a", "#2ca02c", "#8c564b", "#c2185b", "#6b8e23",
)  # fmt: skip
UNITS = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3))
LABEL_GAP = 0.045  # least distance of two labels, as a share of the height of the axes


def by_name(lines: Iterable[Line]) -> dict[str, list[Line]]:
    """Return the lines of each architecture, sorted by context."""
    found: dict[str, list[Line]] = {}
    for line in lines:
        found.setdefault(line["architecture"], []).append(line)
    return {name: sorted(of, key=lambda line: line["context"]) for name, of in found.items()}


def plot(lines: Sequence[Line], folder: Path) -> None:
    """Draw architectures-state.png and architectures-decode.png: points are measured, dashed lines are computed."""
    _plot(
        lines, folder / "architectures-state.png", measured="state_bytes", counted="state_bytes_by_formula", unit=1e6,
        title="State of one sequence", ylabel="state, MB", joined="",
        note="Points: its pages. Dashed: the formula of each mixer.",
    )  # fmt: skip
    _plot(
        lines, folder / "architectures-decode.png", measured="ms", counted="floor_ms", unit=1.0,
        title="Time of the next token", ylabel="milliseconds per token", joined="-",
        note="Points: measured. Dashed: bytes of weights and state, divided by the measured read bandwidth.",
    )  # fmt: skip


def _plot(
    lines: Sequence[Line], path: Path, *, measured: str, counted: str, unit: float, title: str, ylabel: str,
    joined: str, note: str,
) -> None:  # fmt: skip
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    figure = Figure(figsize=(9, 5.8), facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    ends: dict[str, tuple[float, str]] = {}
    for (name, of), color in zip(by_name(lines).items(), COLORS, strict=False):
        x, y = [line["context"] for line in of], [line[measured] / unit for line in of]
        axes.plot(x, [line[counted] / unit for line in of], "--", color=color, lw=1.2, alpha=0.8)
        axes.plot(x, y, f"o{joined}", color=color, lw=2, ms=5)
        ends[name] = y[-1], color
    contexts = sorted({line["context"] for line in lines})
    axes.set(xscale="log", yscale="log", xlabel="context, tokens", ylabel=ylabel)
    axes.set_xticks(contexts, [f"{n:,}" for n in contexts])
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.tick_params(which="minor", length=0)
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    figure.suptitle(title, x=0.01, ha="left", fontsize=15, fontweight="bold")
    axes.set_title(note, loc="left", fontsize=9.5, color="#555555")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    figure.draw_without_rendering()  # the limits of the axes are known now
    _label(axes, contexts[-1], ends)
    figure.savefig(path, dpi=160)


def _label(axes: Axes, x: float, ends: Mapping[str, tuple[float, str]]) -> None:
    """Write each line's name at its end, moved up where labels would overlap."""
    to_axes = axes.transData + axes.transAxes.inverted()
    lowest = -1.0
    for name, (y, color) in sorted(ends.items(), key=lambda item: item[1][0]):
        lowest = max(to_axes.transform((x, y))[1], lowest + LABEL_GAP)
        axes.annotate(
            name, (x, y), xytext=(1.015, lowest), textcoords="axes fraction", va="center", color=color, fontsize=11,
            annotation_clip=False, arrowprops={"arrowstyle": "-", "color": color, "lw": 0.6, "shrinkB": 4},
        )  # fmt: skip


def markdown(lines: Sequence[Line]) -> str:
    """Return a table with one row for each architecture: state, time, and what the bytes predict."""
    rows = by_name(lines)
    base = rows[BASELINE][-1] if BASELINE in rows else None
    contexts = {line["context"] for line in lines}
    first, last = min(contexts), max(contexts)
    out = [
        f"| architecture | state at {last:,} | state by formula | ms per token at {first:,} | ms at {last:,} "
        f"| growth of ms | growth of bytes | speed relative to {BASELINE} | speed by bytes |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, of in rows.items():
        begin, end = of[0], of[-1]
        cells = [
            name, _size(end["state_bytes"]), _size(end["state_bytes_by_formula"]), f"{begin['ms']:.1f}",
            f"{end['ms']:.1f}", f"{end['ms'] / begin['ms']:.1f}x", f"{end['read_bytes'] / begin['read_bytes']:.1f}x",
        ]  # fmt: skip
        cells += [f"{base[key] / end[key]:.1f}x" if base else "-" for key in ("ms", "read_bytes")]
        out.append(f"| {' | '.join(cells)} |")
    return "\n".join(out)


def _size(num_bytes: float) -> str:
    unit, factor = next(((u, f) for u, f in UNITS if num_bytes >= f), UNITS[-1])
    return f"{num_bytes / factor:.3g} {unit}"
