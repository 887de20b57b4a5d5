"""Draw a calibration: memory bandwidth by bytes in use, and the rates of products and attention by number of rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ridgeline.cost.calibration import Calibration
from ridgeline.plan.picture import keep, new_figure
from ridgeline.spec.rates import Passes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SIZE_INCHES = (15.0, 4.5)


def draw(found: Calibration, path: str) -> None:
    """Write the picture as .png or .svg. Raises RequestError for another file name, and if matplotlib is missing."""
    figure = new_figure(path, SIZE_INCHES)
    memory, products, attention = figure.subplots(1, 3)
    rates = found.rates
    for name, curves, style in (("read", rates.read, "o-"), ("copy", rates.copy, "s--")):
        for threads, curve in curves.items():
            sizes = [point / 2**20 for point in curve.points]
            memory.plot(sizes, [v / 1e9 for v in curve.values], style, label=f"{name}, threads: {threads}")
    memory.set(title="memory", xlabel="MiB in use", ylabel="GB/s", xscale="log")
    _rows(products, "products with matrices", rates.products)
    _rows(attention, "attention", rates.attention)
    for axes in (memory, products, attention):
        axes.legend(fontsize="small")
        axes.grid(alpha=0.3)
    figure.suptitle(f"{found.machine['cpu']}, {rates.threads} threads, {rates.isa}; {found.date}")
    keep(figure, path)


def _rows(axes: Axes, title: str, passes: Mapping[str, Passes]) -> None:
    for i, (kind, p) in enumerate(passes.items()):
        for name, curve, style in (("in caches", p.near, "-"), ("in memory", p.far, ":")):
            axes.plot(curve.points, [2e-9 / v for v in curve.values], style, color=f"C{i}", label=f"{kind}, {name}")
    axes.set(title=title, xlabel="rows", ylabel="GFLOP/s", xscale="log", yscale="log")
