"""Show the price report of a changed model: a row for each model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ridgeline.cli.show.quantized import quality_cells
from ridgeline.cli.show.tables import Cell, Column, Line, Table

if TYPE_CHECKING:
    from ridgeline.compress.price import PriceReport


def print_price(report: PriceReport, out: str, as_json: bool) -> None:
    """Print a report as text, or as one JSON object."""
    if as_json:
        import json

        print(json.dumps(report.to_json(), indent=2, allow_nan=False))
        return
    from ridgeline.cli.show.report import say
    from ridgeline.cli.show.tables import screen, show

    show(screen(), *parts(report), f"written to {out}")
    for note in report.notes:
        say(f"note: {note}")


def parts(report: PriceReport) -> Iterator[Table | Line | Cell]:
    """Yield the lines and the table of a report."""
    yield report.title
    if report.source:
        held = "" if report.comparison is None else f"; held-out part: {report.comparison.num_tokens:,} tokens"
        yield f"measured on {report.source}{held}"
    yield _table(report)
    if report.comparison is not None:
        yield "± is half of the 95% interval; that of perplexity is for its change."
    yield f"predicted: decode of one sequence; {report.machine}"
    yield f"read back: logits differ by {report.read_back:.2g} of the largest one"


def _table(report: PriceReport) -> Table:
    columns = {"": None, "parameters": None, "state/token": 2, "predicted": 3}
    if report.comparison is not None:
        columns |= {"KL": 1, "top-1": 4, "perplexity": None}
    out = Table("", [Column(name, right=bool(name), drop=drop) for name, drop in columns.items()])
    for name, price in report.prices.items():
        own = [name, f"{price.params:,}", f"{price.state_bytes:,} B", f"{price.tokens_per_s:,.0f} tok/s"]
        c = report.comparison
        first, second = quality_cells(None if c is None else c.original if name == "original" else c.others[name])
        out.add_row(*own, *first)
        if any(second):
            out.add_row("", "", "", "", *second)
    return out
