"""Draw the figures of a record as SVG that is readable on light and on dark pages.

This needs matplotlib, an optional dependency: pip install ridgeline[plot].
"""

from __future__ import annotations

from importlib.util import find_spec
from io import BytesIO
from typing import Any

from ridgeline.errors import RequestError
from ridgeline.lab.experiment import Figure

SIZE_INCHES = (7.2, 4.2)
COLORS = ("#1f77b4", "#d62728", "#2ca02c", "#e8a010", "#9467bd", "#8c564b", "#17becf", "#7f7f7f")
INK = "#010203"  # stands for the color of the page's text, which replaces it


def check_matplotlib() -> None:
    """Raise RequestError if matplotlib is missing."""
    if find_spec("matplotlib") is None:
        raise RequestError("the page needs matplotlib for its figures; pip install ridgeline[plot]")


def svg(figure: Figure) -> str:
    """Return a figure as an SVG element without a background; its lines and texts have the color of the page's text."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure as Drawing

    style: Any = {"svg.fonttype": "none", "svg.hashsalt": figure.title, "font.size": 10, "text.color": INK,
             "axes.edgecolor": INK, "axes.labelcolor": INK, "xtick.color": INK, "ytick.color": INK}  # fmt: skip
    with rc_context(style):
        drawing = Drawing(figsize=SIZE_INCHES, facecolor="none", layout="constrained")
        FigureCanvasSVG(drawing)
        axes = drawing.subplots()
        axes.set_facecolor("none")
        for i, series in enumerate(figure.series):
            x, y = [p[0] for p in series.points], [p[1] for p in series.points]
            mark, line = ("o", "-") if series.measured else ("", "--")
            axes.plot(x, y, color=COLORS[i % len(COLORS)], label=series.name, marker=mark, linestyle=line)
        if figure.log:
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            axes.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
            axes.yaxis.set_major_formatter(lambda y, _: f"{y:g}")
            if max(axes.get_ylim()) < 20 * min(axes.get_ylim()):  # few decades: their parts need numbers, too
                axes.yaxis.set_minor_formatter(lambda y, _: f"{y:g}" if f"{y:e}"[0] in "235" else "")
            else:
                axes.yaxis.set_minor_formatter(lambda y, _: "")
        axes.set_xlabel(figure.x)
        axes.set_ylabel(figure.y)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(fontsize=9, framealpha=0.0)
        out = BytesIO()
        drawing.savefig(out, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = out.getvalue().decode("utf-8")
    return text[text.index("<svg") :].replace(INK, "currentColor")
