"""Print results as tables: figures of each shape, goals, and every goal that was missed with its cause."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import peer_shapes
from peer_results import Line, Notes, Results, Section, base_of, best, read_notes, version_of
from peer_rounds import LEAST
from peer_table import (
    AMX,
    BARS,
    CONTENDERS,
    LOAD,
    LOWER_IS_BETTER,
    OURS,
    PRODUCTS,
    RESIDENT,
    SIZE,
    STARTUP,
    VNNI,
    Bar,
)
from rich.console import Console
from rich.table import Table

MARK = "<!-- bench/peers.py writes everything below this line -->"
COLUMNS = (  # heading, case, value, format
    ("bits", "decode", "bits_per_weight", "{:.2f}"),
    ("decode tok/s", "decode", "tokens_per_s", "{:.1f}"),
    ("of the read limit", "decode", "read_share", "{:.0%}"),
    ("first token ms", "decode", "first_token_ms", "{:.0f}"),
    ("prompt of 512 tok/s", "prefill", "tokens_per_s", "{:.0f}"),
    ("of 2,048", "prompt2048", "tokens_per_s", "{:.0f}"),
    ("of 8,192", "prompt8192", "tokens_per_s", "{:.0f}"),
    ("8 seqs tok/s", "batch8", "tokens_per_s", "{:.0f}"),
    ("32 seqs tok/s", "batch32", "tokens_per_s", "{:.0f}"),
    ("peak MB", LOAD, "peak_mb", "{:.0f}"),
    ("MB after 200 prompts", RESIDENT, "resident_mb", "{:.0f}"),
    ("load s", LOAD, "load_s", "{:.1f}"),
)
HEADINGS = ["", *(column[0] for column in COLUMNS)]
BAR_HEADINGS = ["figure", "type", "Ridgeline", "best peer", "its figure", "ratio", "goal", ""]
EARLIER_HEADINGS = ["earlier build", "best peer then", "ratio then"]
OWN_HEADINGS = ["installation without torch", "measured", "goal", ""]
MET, MISSED, LEFT_OUT = "met", "missed", "left out"
FIGURES = {
    ("decode", "read_share"): "decode: share of the read limit", ("decode", "tokens_per_s"): "decode: tokens/s",
    ("decode", "first_token_ms"): "first token of 128: ms", ("prefill", "tokens_per_s"): "prompt of 512: tokens/s",
    ("prompt2048", "tokens_per_s"): "prompt of 2,048: tokens/s",
    ("prompt8192", "tokens_per_s"): "prompt of 8,192: tokens/s", ("batch8", "tokens_per_s"): "8 sequences: tokens/s",
    ("batch32", "tokens_per_s"): "32 sequences: tokens/s", (RESIDENT, "resident_mb"): "MB after 200 prompts",
    (PRODUCTS, "peak_share"): "products of 512 tokens: share of the peak",
    (PRODUCTS, "unit_share"): "products of 512 tokens: share of the tiles' peak",
}  # fmt: skip
LIMITS = {
    "read_gb_s": "memory read at {:.1f} GB/s", "fp32_gflop_s": "float32 peak {:.0f} GFLOP/s",
    "int8_gop_s": "int8 peak {:.0f} GOP/s",
}  # fmt: skip
Rows = list[list[str]]


def shape_rows(section: Section, shape: str) -> Rows:
    """Return a row for each program and format with a line. The best figure of its settings counts."""
    rows, lines = [], [line for line in section.lines() if line["shape"] == shape]
    for contender in CONTENDERS:
        mine = [line for line in lines if base_of(line) == contender.base]
        cells = [cell([line for line in mine if line["what"] == case], value, form) for _, case, value, form in COLUMNS]
        if any(cells):
            version = "" if contender.peer == OURS else version_of(mine)
            rows.append([f"{contender.base} ({version})" if version else contender.base, *cells])
    return rows


def cell(lines: list[Line], value: str, form: str) -> str:
    if (found := best(lines, value)) is not None:
        return form.format(found[value])
    if any(line["left_out"] for line in lines):
        return LEFT_OUT
    return "failed" if any("error" in line for line in lines) else ""


Goal = tuple[str, Bar, str, list[str]]  # shape, goal, kind, row of the table
VERDICT = 7  # column of a goal's row


def bar_rows(section: Section, notes: Notes, shape: str) -> list[Goal]:
    """Return the goals of a shape that have a figure in this build or an earlier one.

    A row is: figure, type, own value, best peer, its value, ratio, goal, whether it was met; then, if there are figures
    of an earlier build, own value, best peer and ratio there.
    """
    found = ((bar, kind, bar_row(section, notes, shape, bar, kind)) for bar in BARS for kind in bar.kinds)
    return [(shape, bar, kind, row) for bar, kind, row in found if row]


def bar_row(section: Section, notes: Notes, shape: str, bar: Bar, kind: str) -> list[str]:
    """Return the row of a goal; an empty one if there is no such goal or nothing was measured."""
    limit = bar.limits.get(section.machine.goals, {}).get(shape)
    lines = section.select(shape, bar.case)
    ours = best([line for line in lines if line.get("peer") == OURS and line["kind"] == kind], bar.value)
    then = notes.earlier(shape, bar.case, bar.value, kind)
    if limit is None or (ours is None and not any(then)):
        return []
    *figures, passed = compared(lines, bar, kind, ours, limit) if ours else [""] * 5
    name = FIGURES[bar.case, bar.value] + (" over int8" if bar.over == "int8" else "")
    goal = f"{'<=' if bar.at_most else '>='} {limit:g}"
    return [name, kind, *figures, goal, passed, *(then if notes.has_earlier else ())]


def compared(lines: list[Line], bar: Bar, kind: str, ours: Line, limit: float) -> list[str]:
    """Return own value, best peer, its value, ratio, and whether the goal was met."""
    mine = ours[bar.value]
    if not bar.over:
        return [number(mine), "", "", f"{mine:.2f}", verdict(bar, mine, limit, kind, ours)]
    other = rival(lines, bar, kind, ours)
    if other is None:
        return [number(mine), "none in the same run", "", "", ""]
    lower = bar.value in LOWER_IS_BETTER and not bar.at_most
    ratio = other[bar.value] / mine if lower else mine / other[bar.value]
    return [number(mine), other["contender"], number(other[bar.value]), f"{ratio:.2f}",
            verdict(bar, ratio, limit, kind, ours)]  # fmt: skip


def number(value: float) -> str:
    return f"{value:.4g}" if value < 1000 else f"{value:.0f}"


def verdict(bar: Bar, ratio: float, limit: float, kind: str, ours: Line) -> str:
    passed = MET if (ratio <= limit if bar.at_most else ratio >= limit) else MISSED
    if passed == MISSED and kind in bar.shares and ours.get("read_share", 0) >= bar.shares[kind]:
        passed = f"met: {ours['read_share']:.0%} of the read limit"
    return passed + ("" if ours["correct"] else ", gate not passed")


def rival(lines: list[Line], bar: Bar, kind: str, ours: Line) -> Line | None:
    """Return the best line that Ridgeline is compared with, measured in the same run."""
    if bar.over == "int8":
        others = [line for line in lines if line.get("peer") == OURS and line["kind"] == "int8"]
    else:
        theirs = (line for line in lines if line.get("peer", OURS) != OURS and line["kind"] == kind)
        others = [line for line in theirs if bar.over in ("peer", line["peer"])]
    return best([line for line in others if line["run"] == ours["run"]], bar.value)


def own_rows(section: Section) -> Rows:
    """Return the rows for the size of the installation and for start-up times."""
    rows = []
    for case, value, unit in ((SIZE, "installed_mb", "MB"), (STARTUP, "seconds", "s")):
        for line in (line for line in section.lines() if line["what"] == case):
            what = " ".join(filter(None, (case, line["shape"] or "", line.get("weights", ""))))
            passed = line.get("error") or (MET if line[value] <= line["limit"] else MISSED)
            rows.append([what, f"{line[value]:g} {unit}", f"<= {line['limit']:g} {unit}", passed])
    return rows


def tables(section: Section, notes: Notes) -> Iterator[tuple[str, list[str], Rows]]:
    for shape in peer_shapes.CONFIGS:
        if rows := shape_rows(section, shape):
            limits = ", ".join(LIMITS[name].format(value) for name, value in section.limits(shape).items())
            yield f"{shape}: {limits}" if limits else shape, HEADINGS, rows
        if goals := numbered(section, notes, shape):
            yield f"{shape}: goals", [*BAR_HEADINGS, *(EARLIER_HEADINGS if notes.has_earlier else ())], goals
    if rows := own_rows(section):
        yield "Start and size", OWN_HEADINGS, rows


def causes(section: Section, notes: Notes) -> list[str]:
    """Return the causes of the goals that were missed, in the order in which tables number them."""
    goals = (goal for shape in peer_shapes.CONFIGS for goal in bar_rows(section, notes, shape))
    found = (notes.cause(shape, bar.case, bar.value, kind) for shape, bar, kind, row in goals if missed(row))
    return list(dict.fromkeys(text for text in found if text))


def missed(row: list[str]) -> bool:
    return row[VERDICT].startswith(MISSED)


def numbered(section: Section, notes: Notes, shape: str) -> Rows:
    """Return the rows of a shape's goals; those that were missed have the number of their cause."""
    texts, rows = causes(section, notes), []
    for _, bar, kind, row in bar_rows(section, notes, shape):
        if missed(row):
            text = notes.cause(shape, bar.case, bar.value, kind)
            row[VERDICT] += f": cause {texts.index(text) + 1}" if text else ": the cause is not known yet"
        rows.append(row)
    return rows


def facts(section: Section) -> str:
    """Return when and where the results were measured, and which column of goals they are compared with."""
    lines = section.lines()
    parts = []
    if lines:
        days = sorted({line["run"][:10] for line in lines})
        when = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
        machines = ", ".join(sorted({line["machine"] for line in lines}))
        builds = ", ".join(sorted({line["commit"] for line in lines if line["commit"]}))
        parts.append(f"Measured: {when}, {machines}{f', build {builds}' if builds else ''}.")
    names = {AMX: "AMX", VNNI: "AVX-512 VNNI"}
    column = names[section.machine.goals]
    own = section.machine.name == section.machine.goals
    parts.append(f"The goals are those of {column}" + ("." if own else ", because this kind has no goals of its own."))
    return " ".join(parts)


def sections(results: Results, notes: Mapping[str, Notes]) -> Iterator[tuple[Section, Notes]]:
    """Yield the kinds of machines that have results or notes."""
    for section in results.sections():
        own = notes[section.machine.name]
        if section.lines() or own.about:
            yield section, own


def remarks(section: Section, notes: Notes) -> Iterator[tuple[str, str]]:
    """Yield the lists below the tables, each with its heading."""
    if found := causes(section, notes):
        yield "Causes of the goals that were missed", "\n".join(f"{n}. {text}" for n, text in enumerate(found, 1))
    if found := list(section.left_out()):
        rule = (
            f"A round is left out if the float32 peak was below {LEAST:.0%} of the highest one of the run, or if "
            f"memory was read at less than {LEAST:.0%} or more than {1 / LEAST:.0%} of the run's median rate."
        )
        yield "Rounds that were left out", "\n".join([rule, "", *(f"- {text}" for text in found)])
    if found := list(section.errors()):
        yield "Programs that failed", "\n".join(f"- {text}" for text in found)


def show(results: Results, console: Console) -> None:
    for section, notes in sections(results, read_notes()):
        console.print(f"{section.machine.title}. {facts(section)}", style="bold", highlight=False)
        for title, headings, rows in tables(section, notes):
            table = Table(*headings, title=title, title_justify="left")
            for row in rows:
                failed = row[-1] == MISSED or (headings[0] == BAR_HEADINGS[0] and missed(row))
                style = "red" if failed else "bold" if row[0].startswith(OURS) else None
                table.add_row(*(text.replace("[", r"\[") for text in row), style=style)
            console.print(table)
        for heading, text in remarks(section, notes):
            console.print(f"{heading}\n{text}", highlight=False, markup=False)


def markdown(results: Results, all_notes: Mapping[str, Notes] | None = None) -> str:
    """Return a section for each kind of machine."""
    out: list[str] = []
    for section, notes in sections(results, all_notes or read_notes()):
        out += [f"## {section.machine.title}", facts(section), *notes.about]
        for title, headings, rows in tables(section, notes):
            lines = [headings, ["---"] * len(headings), *rows]
            out += [f"### {title}", "\n".join(f"| {' | '.join(line)} |" for line in lines)]
        for heading, text in remarks(section, notes):
            out += [f"### {heading}", text]
    return "\n\n".join(out) + "\n"


def written(path: Path, text: str) -> str:
    """Return the text of a file with its tables: below the line MARK if it has this line, else only the tables."""
    before, mark, _ = (path.read_text(encoding="utf-8") if path.exists() else "").partition(MARK)
    return f"{before}{mark}\n\n{text}" if mark else text
