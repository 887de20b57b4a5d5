"""Show the report of `ridgeline quantize`: a row for each model, intervals below, and the matrices that lost most."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ridgeline.cli.show.tables import Cell, Column, Line, Table

if TYPE_CHECKING:
    from ridgeline.compress import Report
    from ridgeline.compress.compare import Quality

RTN = "rtn"  # the report's name of the model that is rounded to nearest
MOST_DECIMALS = 4


def parts(report: Report) -> Iterator[Table | Line | Cell]:
    """Yield the lines and the table of a report."""
    yield title(report)
    yield table(report)
    if report.comparison is not None:
        yield "± is half of the 95% interval; that of perplexity is for its change."
    if report.speeds is not None:
        has_rtn = report.comparison is not None and RTN in report.comparison.others
        is_same = has_rtn and _is_format_of_rtn(report)
        same = f"; RTN has the speed of {report.scheme}, whose format it has" if is_same else ""
        yield f"tok/s: decode of one sequence{same}"
        yield from report.speeds.notes
    if worst := ", ".join(f"{str(key).replace('.weight', '')} {_share(lost)}" for key, lost in report.worst()):
        yield Line(f"worst matrices, by the output power that they lost: {worst}", indent=2)


def title(report: Report) -> str:
    """Return the line above the table."""
    group = f" g{report.group}" if report.group else ""
    data = f", calibrated on {report.calibration}" if report.calibration else ""
    held = "" if report.comparison is None else (
        f" (held-out part: {report.comparison.num_tokens:,} tokens, none of them seen)"
    )  # fmt: skip
    return f"{report.scheme}{group} of {report.model}{data}{held}"


def table(report: Report) -> Table:
    """Return the table of a report: a row for each model, and one for its intervals."""
    comparison = report.comparison
    qualities: dict[str, Quality] = (
        {} if comparison is None else {"as stored": comparison.original, **comparison.others}
    )
    speeds = {} if report.speeds is None else report.speeds.by_name
    columns = {"": None, "bits": 4, "MB": None}
    if comparison is not None:
        columns |= {"KL": None, "top-1": 3, "perplexity": None}
    if has_predictions := any(speed.predicted is not None for speed in speeds.values()):
        columns["tok/s predicted"] = 1
    if speeds:
        columns["tok/s measured"] = 2
    out = Table("", [Column(name, right=bool(name), drop=drop) for name, drop in columns.items()])
    for name in dict.fromkeys((*qualities, *report.bits)):
        size = name if name in report.bits else report.scheme
        first, second = quality_cells(qualities.get(name))
        speed = speeds.get(size) if name != RTN or _is_format_of_rtn(report) else None
        rates = [_rate(speed.predicted if speed else None)] if has_predictions else []
        rates += [_rate(speed.measured if speed else None)] if speeds else []
        shown = "RTN" if name == RTN else name
        out.add_row(shown, f"{report.bits[size]:.3g}", megabytes(report.num_bytes[size]), *first, *rates)
        if any(second):
            out.add_row("", "", "", *second, *("" for _ in rates))
    return out


def _is_format_of_rtn(report: Report) -> bool:
    """Return whether RTN has the format of the scheme: it rounds the outliers that LLM.int8() keeps."""
    return not report.format.endswith("-outliers")


def megabytes(num_bytes: float) -> str:
    """Return millions of bytes: with a decimal below 100."""
    found = num_bytes / 1e6
    return f"{found:.1f}" if found < 100 else f"{found:,.0f}"


def with_interval(value: float, half: float | None) -> tuple[str, str]:
    """Return a value, and half of its interval with one significant digit, both with as many decimals as that needs."""
    if half is None or not math.isfinite(half) or half <= 0:
        return f"{value:.3g}", ""
    decimals = min(max(-math.floor(math.log10(half)), 0), MOST_DECIMALS)
    up = math.ceil(half * 10**decimals - 1e-9) / 10**decimals
    return f"{value:,.{decimals}f}", f"±{up:,.{decimals}f}"


def quality_cells(quality: Quality | None) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the cells of KL, top-1 and perplexity, and those of their intervals."""
    if quality is None:
        return (), ()
    value = quality.perplexity.value
    perplexity = f"{value:.3f}" if value < 10 else f"{value:.2f}" if value < 1000 else f"{value:.4g}"
    if quality.kl is None or quality.top1 is None or quality.change is None:
        return ("", "", perplexity), ()
    from ridgeline.compress.compare import INTERVAL

    kl, kl_half = with_interval(quality.kl.value, _half(quality.kl.standard_error, INTERVAL))
    top1 = max(quality.top1.high - quality.top1.value, quality.top1.value - quality.top1.low)
    half = _half(quality.change.standard_error, 100 * INTERVAL)
    change = "" if half is None else f"±{half:.1f}%"
    first = kl, f"{quality.top1.value:.1%}", f"{perplexity} {quality.change.value - 1:+.1%}"
    return first, (kl_half, f"±{top1:.1%}", change)


def _half(error: float | None, times: float) -> float | None:
    return None if error is None else error * times


def _rate(tokens_per_s: float | None) -> str:
    return "" if tokens_per_s is None else f"{tokens_per_s:,.0f}" if tokens_per_s >= 100 else f"{tokens_per_s:.3g}"


def _share(lost: float) -> str:
    return f"{lost:.1%}" if lost >= 0.0005 else f"{lost:.2%}"
