"""Print claims and what became of them as tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.text import Text

from ridgeline.cli.show.tables import Column, Line, Table
from ridgeline.lab.claim import claims
from ridgeline.lab.judgement import Verdict

if TYPE_CHECKING:
    from ridgeline.lab import Experiment, Record

STYLES = {Verdict.holds: "green", Verdict.differs: "bold red", Verdict.untried: "yellow"}


def claims_table(experiments: Sequence[Experiment]) -> Table:
    """Return a table of all claims, with the experiment of each."""
    by_claim = {number: e.name for e in experiments for number in e.claims}
    columns = Column("claim"), Column("experiment", right=False), Column("what is said", right=False, wraps=True)
    table = Table("", columns)
    for number, claim in claims().items():
        table.add_row(f"{number}", by_claim.get(number, "-"), claim.text)
    return table


def record_tables(record: Record) -> list[Table | Line]:
    """Return the table of an experiment's verdicts, and lines on its conditions."""
    table = Table(
        record.title,
        (
            Column("claim"), Column("verdict", right=False), Column("number"), Column("limit", right=False, drop=1),
            Column("what was seen", right=False, wraps=True),
        ),
    )  # fmt: skip
    for j in record.judgements:
        effect = "" if j.effect is None else f"{j.effect:.4g}"
        table.add_row(f"{j.claim}", Text(j.verdict, STYLES[j.verdict]), effect, j.threshold, j.text)
    lines = [record.reading]
    if record.is_busy:
        lines.append(f"other programs used {record.others:.0%} of the machine meanwhile, so times may be too long")
    return [table, *(Line(line, style="dim") for line in lines)]
