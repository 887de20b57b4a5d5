"""Print the results of bench/cheaper.py as a table, and draw quality and associative recall against cost and state."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

Line = Mapping[str, Any]
KINDS = ("made", "kl", "ce", "random", "random-cost")
COLORS = {
    "original": "#4b4b4b", "made": "#8c564b", "kl": "#1f77b4", "ce": "#e8710a", "random": "#2ca02c",
    "random-cost": "#9467bd",
}  # fmt: skip
# Student's t for an interval of 95 % of a mean, by the number of seeds less one.
T95 = {1: 12.71, 2: 4.303, 3: 3.182, 4: 2.776}


def by_change(lines: Sequence[Line]) -> dict[str, dict[str, list[Line]]]:
    """Return the lines of each change by contender, with those of the most tokens only, which leaves out the sweep."""
    found: dict[str, dict[str, list[Line]]] = {}
    for line in lines:
        if line["kind"] != "original":
            found.setdefault(line["change"], {}).setdefault(line["kind"], []).append(line)
    return {
        change: {
            kind: [one for one in of if one.get("tokens") == max((x.get("tokens") or 0 for x in of), default=0)]
            if kind != "made" else of
            for kind, of in kinds.items()
        }
        for change, kinds in found.items()
    }  # fmt: skip


def interval(values: Sequence[float]) -> float | None:
    """Return half of the 95 % interval of a mean; None for one value."""
    if len(values) < 2:
        return None
    return T95.get(len(values) - 1, 1.96) * stdev(values) / math.sqrt(len(values))


def recovery(kinds: Mapping[str, Sequence[Line]], original: Line) -> float | None:
    """Return (loss of `random` - loss of `kl`) / (loss of `random` - that of the original); None if one is missing."""
    if not kinds.get("kl") or not kinds.get("random"):
        return None
    repaired, random = (mean(math.log(one["perplexity"]) for one in kinds[kind]) for kind in ("kl", "random"))
    return (random - repaired) / (random - math.log(original["perplexity"]))


def table(lines: Sequence[Line]) -> str:
    """Return a table in Markdown: means over seeds, with half of the 95 % interval of the loss."""
    original = next(line for line in lines if line["kind"] == "original")
    rows = [
        "| change | contender | seeds | tokens | rate | KL | top-1 | perplexity | loss, nats | recall |",
        "|---|---|---|---|---|---|---|---|---|---|",
        f"| | original | | | | 0 | 100 % | {original['perplexity']:.2f} | {math.log(original['perplexity']):.3f} | "
        f"{original['recall']:.2f} |",
    ]  # fmt: skip
    for change, kinds in by_change(lines).items():
        for kind in KINDS:
            if not (of := kinds.get(kind)):
                continue
            loss = [math.log(one["perplexity"]) for one in of]
            half = interval(loss)
            spread = "" if half is None else f" ± {half:.3f}"
            first = of[0]
            tokens, rate = first.get("tokens"), first.get("rate")  # the changed model itself has neither
            rows.append(
                f"| {change} | {kind} | {len(of)} | {f'{tokens:,}' if tokens else ''} | {rate or ''} | "
                f"{mean(one['kl'] for one in of):.3f} | {mean(one['top1_agreement'] for one in of):.1%} | "
                f"{math.exp(mean(loss)):.2f} | {mean(loss):.3f}{spread} | {mean(one['recall'] for one in of):.2f} |"
            )
        if (share := recovery(kinds, original)) is not None:
            rows.append(f"| {change} | recovery of kl | | | | | | | {share:.2f} | |")
    return "\n".join(rows)


def draw(lines: Sequence[Line], folder: Path) -> None:
    """Draw cheaper-quality.png and cheaper-state.png into a folder."""
    cost = [(line, 1e3 / line["predicted_tokens_per_s"], math.log(line["perplexity"])) for line in lines]
    _plot(cost, folder / "cheaper-quality.png", "predicted milliseconds per token", "loss, nats per token")
    state = [(line, line["state_bytes_per_token"], line["recall"]) for line in lines]
    _plot(state, folder / "cheaper-state.png", "bytes of state per token", "associative recall")


def _plot(points: Sequence[tuple[Line, float, float]], path: Path, xlabel: str, ylabel: str) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for kind, color in COLORS.items():
        if of := [(x, y) for line, x, y in points if line["kind"] == kind]:
            axes.scatter(*zip(*of, strict=True), color=color, label=kind, s=36, alpha=0.85)
    for change in dict.fromkeys(line["change"] for line, _, _ in points if line["change"]):
        x, y = min(((x, y) for line, x, y in points if line["change"] == change), key=lambda p: p[1])
        axes.annotate(change, (x, y), textcoords="offset points", xytext=(6, -12), fontsize=8)
    axes.set(xlabel=xlabel, ylabel=ylabel)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)
