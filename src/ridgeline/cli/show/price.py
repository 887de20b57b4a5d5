"""Show the price report of a changed model: a row for each model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from ridgeline.cli.show.quantized import with_interval
from ridgeline.cli.show.tables import Cell, Column, Line, Table

if TYPE_CHECKING:
    from collections.abc import Sequence

INTERVAL = 1.96  # standard errors
# Names of the columns, and the order in which they are dropped on a narrow screen.
COLUMNS: Mapping[str, int | None] = {
    "": None, "params": None, "state bytes": 2, "tok/s predicted": 3, "tok/s measured": 4, "KL": 1, "top-1": 5,
    "perplexity": None, "recall": None,
}  # fmt: skip
_SIZES = ((1e9, "B"), (1e6, "M"), (1e3, "k"))


class _Report(Protocol):
    @property
    def notes(self) -> Sequence[str]: ...

    def to_json(self) -> dict[str, Any]: ...


def print_price(report: _Report, out: str, as_json: bool) -> None:
    """Print a report as text, or as one JSON object."""
    found = report.to_json()
    if as_json:
        import json

        print(json.dumps(found, indent=2, allow_nan=False))
        return
    from ridgeline.cli.show.report import say
    from ridgeline.cli.show.tables import screen, show

    show(screen(), *parts(found), f"written to {out}")
    for note in report.notes:
        say(f"note: {note}")


def parts(report: Mapping[str, Any]) -> Iterator[Table | Line | Cell]:
    """Yield the lines and the table of a report as JSON. Raises LookupError or TypeError for a damaged one."""
    models, tokens = report["models"], report.get("held_out_tokens")
    yield report["title"]
    if report["calibration"]:
        yield f"measured on {report['calibration']}" + (f"; held-out part: {tokens:,} tokens" if tokens else "")
    yield price_table(models)
    for name, text in report.get("names", {}).items():
        yield f"{name}: {text}"
    if tokens:
        yield "± is half of the 95% interval; that of perplexity is for its change."
    yield "state: bytes for each token of a sequence"
    yield f"predicted: decode of one sequence; {report['machine']}"
    if report["read_back_difference"] is not None:
        yield f"read back: logits differ by {report['read_back_difference']:.2g} of the largest one"
    yield from report.get("results", ())


def price_table(models: Mapping[str, Mapping[str, Any]]) -> Table:
    """Return a table of models by name, without the columns that none of them has."""
    rows = {name: _cells(values) for name, values in models.items()}
    shown = [
        i for i, column in enumerate(COLUMNS)
        if column in ("", "params", "state bytes") or any(first[i] for first, _ in rows.values())
    ]  # fmt: skip
    names = list(COLUMNS)
    out = Table("", [Column(names[i], right=i > 0, drop=COLUMNS[names[i]]) for i in shown])
    for name, (first, second) in rows.items():
        out.add_row(*(name if i == 0 else first[i] for i in shown))
        if any(second):
            out.add_row(*(second[i] for i in shown))
    return out


def _cells(values: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Return the cells of a model, and those of their intervals."""
    kl, low = _interval(values, "kl", 1.0), ""
    top1 = values.get("top1_agreement")
    if top1 is not None:
        low = f"±{max(abs(edge - top1) for edge in values['top1_agreement_95']):.1%}"
    change = values.get("perplexity_change_standard_error")
    first = [
        "", _count(values["params"]), f"{values['state_bytes_per_token']:,}", _rate(values["predicted_tokens_per_s"]),
        _rate(values.get("measured_tokens_per_s")), kl[0], "" if top1 is None else f"{top1:.1%}",
        _perplexity(values.get("perplexity")), _recall(values.get("recall")),
    ]  # fmt: skip
    second = ["", "", "", "", "", kl[1], low, "" if change is None else f"±{100 * INTERVAL * change:.1f}%", ""]
    return first, second


def _interval(values: Mapping[str, Any], name: str, times: float) -> tuple[str, str]:
    if (value := values.get(name)) is None:
        return "", ""
    error = values.get(f"{name}_standard_error")
    return with_interval(value * times, None if error is None else error * times * INTERVAL)


def _count(number: int) -> str:
    size, unit = next(((s, u) for s, u in _SIZES if number >= s), (1, ""))
    found = number / size
    return (f"{found:.2f}" if found < 10 else f"{found:.1f}" if found < 100 else f"{found:.0f}") + f" {unit}".rstrip()


def _rate(tokens_per_s: float | None) -> str:
    return "" if tokens_per_s is None else f"{tokens_per_s:,.0f}" if tokens_per_s >= 100 else f"{tokens_per_s:.3g}"


def _perplexity(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}" if value < 1000 else f"{value:.4g}"


def _recall(value: Any) -> str:
    """Return the mean of associative recall. value: the number, or the whole measurement."""
    return "" if value is None else f"{value['recall'] if isinstance(value, Mapping) else value:.2f}"
