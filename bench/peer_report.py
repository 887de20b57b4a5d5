"""Read the measured lines from the results' file and print them as tables."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peer_shapes
from peer_table import BARS, CASES, CONTENDERS, LOAD, LOWER_IS_BETTER, OURS, SIZE, STARTUP, Bar, Contender
from rich.console import Console
from rich.table import Table

COLUMNS = (  # heading, case, value, format
    ("bits", "decode", "bits_per_weight", "{:.2f}"),
    ("decode tok/s", "decode", "tokens_per_s", "{:.1f}"),
    ("of the read limit", "decode", "read_share", "{:.0%}"),
    ("first token ms", "decode", "first_token_ms", "{:.0f}"),
    ("prefill 512 tok/s", "prefill", "tokens_per_s", "{:.0f}"),
    ("8 seqs tok/s", "batch8", "tokens_per_s", "{:.0f}"),
    ("32 seqs tok/s", "batch32", "tokens_per_s", "{:.0f}"),
    ("peak MB", LOAD, "peak_mb", "{:.0f}"),
    ("load s", LOAD, "load_s", "{:.1f}"),
)
Rows = list[list[str]]


class Results:
    """Lines of a file. The latest line of a shape, case and contender counts."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lines: dict[tuple[str, str, str], dict[str, Any]] = {}
        if path.exists():
            for text in path.read_text(encoding="utf-8").splitlines():
                self._keep(json.loads(text))

    def _keep(self, line: dict[str, Any]) -> None:
        self._lines[line["shape"], line["what"], line.get("contender", "")] = line

    def add(self, line: dict[str, Any]) -> None:
        self._keep(line)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def get(self, shape: str, case: str, contender: str = "") -> dict[str, Any]:
        return self._lines.get((shape, case, contender), {})

    def contenders(self, shape: str, case: str) -> set[str]:
        """Return the contenders with a line, errors included."""
        return {name for s, c, name in self._lines if (s, c) == (shape, case)}

    def gate(self, shape: str, contender: Contender) -> bool:
        """Return whether Ridgeline's tokens passed; those of a peer are not checked."""
        return contender.peer != OURS or bool(self.get(shape, "gate", contender.name).get("correct"))

    def lines(self, case: str) -> list[dict[str, Any]]:
        return [line for (_, c, _), line in self._lines.items() if c == case]

    def limits(self, shape: str) -> dict[str, float]:
        """Return the machine's limits that were measured with a shape's cases: those of the median bandwidth."""
        lines = [line for case in CASES for line in self.lines(case) if line["shape"] == shape and "limits" in line]
        found = sorted((line["limits"] for line in lines), key=lambda limits: limits["read_gb_s"])
        return found[len(found) // 2] if found else {}


def shape_rows(results: Results, shape: str) -> Rows:
    """Return a row for each contender with a line, then rows of errors."""
    rows = []
    for contender in CONTENDERS:
        cells = [cell(results.get(shape, case, contender.name), value, form) for _, case, value, form in COLUMNS]
        if any(cells):
            version = results.get(shape, "decode", contender.name).get("version", "")
            name = contender.name if contender.peer == OURS else f"{contender.name} ({version})"
            rows.append([name, *cells])
    return rows


def cell(line: dict[str, Any], value: str, form: str) -> str:
    if value in line:
        return form.format(line[value])
    return "failed" if "error" in line else ""


def errors(results: Results, shape: str) -> Iterator[str]:
    for contender in CONTENDERS:
        found = {results.get(shape, case, contender.name).get("error") for case in (*CASES, LOAD)} - {None}
        yield from (f"{contender.name}: {error}" for error in sorted(found))


def bar_rows(results: Results, shape: str) -> Rows:
    """Return rows of a goal: figure, type, own value, best peer, its value, ratio, goal, and whether it was met."""
    return [row for bar in BARS for kind in bar.kinds if (row := bar_row(results, shape, bar, kind))]


def bar_row(results: Results, shape: str, bar: Bar, kind: str) -> list[str] | None:
    ours = results.get(shape, bar.case, f"{OURS} {kind}")
    if bar.value not in ours:
        return None
    mine, limit = ours[bar.value], bar.limits[shape]
    name, ratio, peer, theirs = f"{bar.case}: {FIGURES[bar.value]}", mine, "", None
    if bar.over:
        other = rival(results, shape, bar, kind, ours)
        if other is None:
            return [name, kind, f"{mine:g}", "none in the same run", "", "", f"{limit:g}", ""]
        lower = bar.value in LOWER_IS_BETTER and not bar.at_most
        peer, theirs = other["contender"], other[bar.value]
        ratio = theirs / mine if lower else mine / theirs
    passed = ratio <= limit if bar.at_most else ratio >= limit
    sign = "<=" if bar.at_most else ">="
    verdict = ("met" if passed else MISSED) + ("" if ours["correct"] else ", gate not passed")
    figure = "" if theirs is None else f"{theirs:g}"
    return [name, kind, f"{mine:g}", peer, figure, f"{ratio:.2f}", f"{sign} {limit:g}", verdict]


def rival(results: Results, shape: str, bar: Bar, kind: str, ours: dict[str, Any]) -> dict[str, Any] | None:
    """Return the peer that Ridgeline is compared with, measured in the same run."""
    if bar.over == "int8":
        others = [results.get(shape, bar.case, f"{OURS} int8")]
    else:
        peers = [c for c in CONTENDERS if c.kind == kind and c.peer != OURS and bar.over in ("peer", c.peer)]
        others = [results.get(shape, bar.case, c.name) for c in peers]
    there = [line for line in others if bar.value in line and line["run"] == ours["run"]]
    best = min if bar.value in LOWER_IS_BETTER else max
    return best(there, key=lambda line: line[bar.value]) if there else None


def own_rows(results: Results) -> Rows:
    """Return the rows for the size of the installation and for start-up times."""
    rows = []
    for case, value, unit in ((SIZE, "installed_mb", "MB"), (STARTUP, "seconds", "s")):
        for line in results.lines(case):
            what = " ".join(filter(None, (case, line["shape"] or "", line.get("weights", ""))))
            verdict = line.get("error") or ("met" if line[value] <= line["limit"] else MISSED)
            rows.append([what, f"{line[value]:g} {unit}", f"<= {line['limit']:g} {unit}", verdict])
    return rows


HEADINGS = ["", *(column[0] for column in COLUMNS)]
BAR_HEADINGS = ["figure", "type", "Ridgeline", "best peer", "its figure", "ratio", "goal", ""]
OWN_HEADINGS = ["installation without torch", "measured", "goal", ""]
MISSED = "missed"
FIGURES = {
    "read_share": "share of the read limit", "tokens_per_s": "tokens/s", "first_token_ms": "time to first token, ms",
    "peak_mb": "peak memory, MB",
}  # fmt: skip
LIMITS = {
    "read_gb_s": "memory read at {:g} GB/s", "fp32_gflop_s": "float32 peak {:g} GFLOP/s",
    "int8_gop_s": "int8 peak {:g} GOP/s",
}  # fmt: skip


def tables(results: Results) -> Iterator[tuple[str, list[str], Rows]]:
    for shape in peer_shapes.CONFIGS:
        if rows := shape_rows(results, shape):
            limits = ", ".join(LIMITS[name].format(value) for name, value in results.limits(shape).items())
            yield f"{shape}: {limits}", HEADINGS, rows
            yield f"{shape}: goals", BAR_HEADINGS, bar_rows(results, shape)
    if rows := own_rows(results):
        yield "Start and size", OWN_HEADINGS, rows


def show(results: Results, console: Console) -> None:
    for title, headings, rows in tables(results):
        table = Table(*headings, title=title, title_justify="left")
        for row in rows:
            style = "red" if row[-1].startswith(MISSED) else "bold" if row[0].startswith(OURS) else None
            table.add_row(*row, style=style)
        console.print(table)
    for shape in peer_shapes.CONFIGS:
        for line in errors(results, shape):
            console.print(f"{shape} {line}", style="red", highlight=False)


def markdown(results: Results) -> str:
    out = []
    for title, headings, rows in tables(results):
        lines = [headings, ["---"] * len(headings), *rows]
        out.append(f"## {title}\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n")
    failed = [f"- {shape} {line}" for shape in peer_shapes.CONFIGS for line in errors(results, shape)]
    return "\n".join([*out, *failed]) + "\n"
