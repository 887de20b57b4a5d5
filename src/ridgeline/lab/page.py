"""Write records as one HTML page that opens from disk, without a network, in light and in dark."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from ridgeline.lab.claim import claims
from ridgeline.lab.experiment import Figure
from ridgeline.lab.figures import svg
from ridgeline.lab.judgement import Judgement, Verdict
from ridgeline.lab.run import Record

STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --page: #ffffff; --line: #d0d7de; --quiet: #59636e;
  --holds: #1a7f37; --differs: #cf222e; --untried: #9a6700; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --page: #0d1117; --line: #30363d; --quiet: #9198a1;
  --holds: #3fb950; --differs: #f85149; --untried: #d29922; } }
body { color: var(--ink); background: var(--page); font: 16px/1.5 system-ui, sans-serif; margin: 2rem auto;
  max-width: 60rem; padding: 0 1rem; }
h1, h2, h3 { line-height: 1.25; } h2 { border-top: 1px solid var(--line); margin-top: 2.5rem; padding-top: 1.5rem; }
table { border-collapse: collapse; display: block; overflow-x: auto; }
th, td { border-bottom: 1px solid var(--line); padding: .3rem .7rem; text-align: left; vertical-align: top; }
td.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.quiet { color: var(--quiet); } .holds { color: var(--holds); } .differs { color: var(--differs); }
.untried { color: var(--untried); } .verdict { font-weight: 600; white-space: nowrap; }
svg { height: auto; max-width: 100%; } details { margin: .5rem 0 1.5rem; } a { color: inherit; }
"""


def counted(judgements: Iterable[Judgement]) -> str:
    """Return how many claims hold, differ and cannot be tried, as one line."""
    found = [j.verdict for j in judgements]
    parts = ((Verdict.holds, "hold"), (Verdict.differs, "differ"), (Verdict.untried, "cannot be tried here"))
    return f"{len(found)} of {len(claims())} claims: " + ", ".join(f"{found.count(v)} {text}" for v, text in parts)


def page(records: Sequence[Record], note: str) -> str:
    """Return the page. note: a line that says for which machine times are predicted."""
    line = counted(j for r in records for j in r.judgements)
    body = "\n".join((_summary(records), *map(_section, records)))
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>Claims about inference, run again</title><style>{STYLE}</style></head>
<body><h1>Claims about inference, run again</h1>
<p>{line}.</p><p class="quiet">{escape(note)}</p>
{body}
</body></html>
"""


def _summary(records: Sequence[Record]) -> str:
    """Return a table with a row for each claim, in the order of their numbers."""
    found = sorted(((j, r) for r in records for j in r.judgements), key=lambda pair: pair[0].claim)
    rows = "".join(
        f'<tr><td class="number">{j.claim}</td><td>{escape(claims()[j.claim].text)}</td>{_verdict(j)}'
        f'<td><a href="#{r.name}">{r.name}</a></td></tr>'
        for j, r in found
    )
    return f"<table><tr><th>claim</th><th>what is said</th><th>verdict</th><th>experiment</th></tr>{rows}</table>"


def _verdict(j: Judgement) -> str:
    return f'<td class="verdict {j.verdict.name}">{j.verdict}</td>'


def _section(record: Record) -> str:
    busy = f"; other programs used {record.others:.0%} of the machine meanwhile, so times may be too long"
    measured = f"predicted at {record.predicted_at}, measured until {record.measured_at} in {record.seconds:,.1f} s"
    return f"""<section id="{record.name}"><h2>{escape(record.title)}</h2>
<p><code>ridgeline lab {record.name}</code></p><p>{escape(record.reading)}</p>
<p class="quiet">{measured}{busy if record.is_busy else ""}</p>
{_judgements(record)}
{"".join(map(_figure, record.figures))}
<details><summary>Everything predicted and measured</summary>{_facts(record)}</details></section>"""


def _judgements(record: Record) -> str:
    rows = ""
    for j in record.judgements:
        claim = claims()[j.claim]
        said = f"{claim.text} ({claim.source})" + (f" Conditions: {claim.conditions}" if claim.conditions else "")
        spread = "" if j.low is None or j.high is None else f"{j.low:.4g} to {j.high:.4g}"
        effect = "" if j.effect is None else f"{j.effect:.4g}"
        rows += (
            f'<tr><td class="number">{j.claim}</td><td>{escape(said)}</td>{_verdict(j)}<td>{escape(j.text)}</td>'
            f'<td class="number">{effect}</td><td class="number">{spread}</td><td>{escape(j.threshold)}</td></tr>'
        )
    names = ("claim", "what is said", "verdict", "what was seen", "number", "interval", "limit")
    return f"<table><tr>{''.join(f'<th>{name}</th>' for name in names)}</tr>{rows}</table>"


def _figure(figure: Figure) -> str:
    """Return a figure and its data as a table, with a row for each value of the horizontal axis."""
    values_of_x = sorted({x for series in figure.series for x, _ in series.points})
    values = [dict(series.points) for series in figure.series]
    head = "".join(f"<th>{escape(name)}</th>" for name in (figure.x, *(series.name for series in figure.series)))
    rows = "".join(
        f"<tr>{_number(x)}{''.join(_number(points.get(x)) for points in values)}</tr>" for x in values_of_x
    )  # fmt: skip
    return (
        f"<h3>{escape(figure.title)}</h3>{svg(figure)}<details><summary>Its data ({escape(figure.y)})</summary>"
        f"<table><tr>{head}</tr>{rows}</table></details>"
    )


def _number(value: float | None) -> str:
    return f'<td class="number">{"" if value is None else f"{value:.5g}"}</td>'


def _facts(record: Record) -> str:
    rows = "".join(
        f"<tr><td>{kind}</td><td>{escape(name)}</td><td><code>{escape(str(value))}</code></td></tr>"
        for kind, facts in (("setup", record.setup), ("predicted", record.predicted), ("measured", record.measured))
        for name, value in facts.items()
    )
    return f"<table><tr><th></th><th>name</th><th>value</th></tr>{rows}</table>"
