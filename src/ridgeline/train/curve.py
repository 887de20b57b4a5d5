"""Read a run's log, and draw it: the losses, the best held-out loss, the learning rate.

This needs matplotlib, an optional dependency: pip install ridgeline[plot]. pyplot is not used, because it has global
state.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ridgeline.errors import DataError
from ridgeline.train.loop import Progress

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Floats = np.ndarray[Any, np.dtype[np.float64]]
SIZE_INCHES, DPI = (7.5, 5.6), 200
TRAINING, HELD_OUT, QUIET = "tab:blue", "tab:orange", "0.35"
START_SHARE = 0.04  # share of the steps whose high loss at the start does not set the scale of the y axis
WINDOWS = 40  # number of parts of a run over which the smooth line takes means
DOTTED = 60  # with more held-out points than this, they are drawn without dots
LEAST_MARGIN = 0.02  # nats; a smaller margin would magnify rounding errors
_UNITS = ((1e9, "billions"), (1e6, "millions"), (1e3, "thousands"))


def read_log(path: Path) -> list[Progress]:
    """Return the steps of a log.jsonl. Raises DataError, which names the line, for an incomplete or invalid line."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as e:
        raise DataError(f"the log {path} cannot be read: {e}") from None
    return [_parse(line, f"{path}, line {number}") for number, line in enumerate(lines, 1)]


def _parse(line: str, where: str) -> Progress:
    try:
        progress = Progress(**json.loads(line))
    except (ValueError, TypeError, RecursionError) as e:
        raise DataError(f"{where} is not a training step ({e}); remove the line, or resume the run") from None
    numbers = asdict(progress)
    if not isinstance(machine := numbers.pop("machine"), str):
        raise DataError(f"{where}: machine is {machine!r}, which is not a text; remove the line, or resume the run")
    for name, value in numbers.items():
        kinds = int if name == "step" else int | float | None if name == "held_out" else int | float
        if isinstance(value, bool) or not isinstance(value, kinds):
            raise DataError(f"{where}: {name} is {value!r}, which is not a number; remove the line, or resume the run")
    return progress


def draw_curve(
    log: Sequence[Progress], batch_tokens: int, bytes_per_token: float | None, title: str, path: Path
) -> None:  # fmt: skip
    """Draw a run into a PNG of 1,500 x 1,120 pixels. If that fails, `path` keeps its old content.

    batch_tokens: tokens of a step. bytes_per_token: bytes per token of the held-out text, for an axis in bits per byte;
    None: no such axis. A loss that is not finite is left out. Raises DataError if no step has a finite loss, and if
    matplotlib is not installed.
    """
    steps = [p for p in log if math.isfinite(p.loss)]
    if not steps:
        raise DataError("the log has no step with a finite loss to draw")
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise DataError("drawing the loss needs matplotlib; pip install ridgeline[plot]") from None
    figure = Figure(figsize=SIZE_INCHES, layout="constrained")
    FigureCanvasAgg(figure)
    losses, rates = figure.subplots(2, 1, sharex=True, height_ratios=[4, 1])
    last = steps[-1].step * batch_tokens
    size, unit = next(((s, u) for s, u in _UNITS if last >= s), (1.0, ""))
    _draw_losses(losses, steps, batch_tokens / size, bytes_per_token)
    # The legend is outside the axes, where it hides no line. It also holds the title, which it would otherwise overlap.
    legend = figure.legend(
        loc="outside upper center", ncols=2, frameon=False, fontsize=10, title=title, title_fontsize=13
    )  # fmt: skip
    legend.get_title().set_parse_math(False)
    _draw_rates(rates, steps, batch_tokens / size)
    rates.set(xlabel=f"tokens seen ({unit})" if unit else "tokens seen", xlim=(0, last / size * 1.015))
    partial = path.with_name(f".{path.name}.partial")
    try:
        figure.savefig(partial, format="png", dpi=DPI)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _draw_losses(axes: Axes, steps: Sequence[Progress], tokens: float, bytes_per_token: float | None) -> None:
    """Draw the losses. tokens: tokens of a step, in the unit of the x axis."""
    x, loss = tokens * np.array([float(p.step) for p in steps]), np.array([p.loss for p in steps])
    window = max(1, len(steps) // WINDOWS) | 1
    smooth = _means(loss, window)
    if window > 1:
        axes.plot(x, loss, color=TRAINING, alpha=0.25, linewidth=0.8, label="training, each step")
        axes.plot(x, smooth, color=TRAINING, linewidth=1.8, label=f"training, mean of {window} steps")
    else:
        axes.plot(x, loss, ".-", color=TRAINING, label="training, each step")
    measured = [(p.step, p.held_out) for p in steps if p.held_out is not None and math.isfinite(p.held_out)]
    if measured:
        _draw_held_out(axes, measured, tokens, bytes_per_token)
    start = min(math.ceil(START_SHARE * len(steps)), len(steps) - 1)
    shown = [*smooth[start:], *(value for step, value in measured if step >= steps[start].step)]
    low, high = min(loss.min(), *shown), max(shown)
    margin = max(0.04 * (high - low), LEAST_MARGIN)
    axes.set_ylim(low - margin, high + margin)
    _add_note_on_points_above(axes, loss, np.array([value for _, value in measured]), high + margin)
    axes.set_ylabel("loss, nats per token")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    if bytes_per_token:
        _add_bits_per_byte(axes, 1 / (math.log(2) * bytes_per_token))


def _add_bits_per_byte(axes: Axes, factor: float) -> None:
    def bits(nats: Any) -> Any:
        return nats * factor

    def nats(bits: Any) -> Any:
        return bits / factor

    axes.secondary_yaxis("right", functions=(bits, nats)).set_ylabel("bits per byte")


def _draw_held_out(
    axes: Axes, measured: Sequence[tuple[int, float]], tokens: float, bytes_per_token: float | None
) -> None:  # fmt: skip
    x, y = [tokens * step for step, _ in measured], [value for _, value in measured]
    marker = "o-" if len(measured) <= DOTTED else "-"
    axes.plot(x, y, marker, color=HELD_OUT, markersize=3.5, linewidth=1.3, label="held-out")
    step, best = min(measured, key=lambda point: point[1])
    bits = f", {best / math.log(2) / bytes_per_token:.4f} bits per byte" if bytes_per_token else ""
    axes.plot(
        tokens * step, best, "*", color=HELD_OUT, markeredgecolor="black", markeredgewidth=0.7, markersize=13,
        linestyle="none", zorder=5, clip_on=False,
        label=f"best held-out, after step {step:,}:\n{best:.4f} nats per token{bits}",
    )  # fmt: skip


def _add_note_on_points_above(axes: Axes, loss: Floats, held_out: Floats, top: float) -> None:
    above, also = int((loss > top).sum()), int((held_out > top).sum())
    if above or also:
        points = f" and {also:,} of {len(held_out):,} held-out points" if also else ""
        text = f"not shown above: {above:,} of {len(loss):,} steps (the largest: {loss.max():.2f}){points}"
        ground = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1}
        axes.text(0.012, 0.022, text, transform=axes.transAxes, fontsize=8.5, color=QUIET, bbox=ground)


def _draw_rates(axes: Axes, steps: Sequence[Progress], tokens: float) -> None:
    rates = [p.learning_rate for p in steps]
    style = "-" if len(steps) > 1 else "."
    axes.plot([tokens * p.step for p in steps], rates, style, color=QUIET, linewidth=1.5)
    peak = max(rates)
    axes.set_yticks(*(((0, peak), ("0", f"{peak:g}")) if peak > 0 else ((0,), ("0",))))
    axes.set_ylim(0, 1.1 * peak if peak > 0 else 1)
    axes.set_ylabel("learning\nrate")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def _means(values: Floats, window: int) -> Floats:
    """Return the mean of the `window` (odd) values around each value. At the ends only existing values count."""
    ones = np.ones(window)
    found: Floats = np.convolve(values, ones, "same") / np.convolve(np.ones_like(values), ones, "same")
    return found
