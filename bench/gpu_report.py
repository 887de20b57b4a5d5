"""The report of bench/gpu.py: the goals beside what was measured, and two commits beside each other."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from gpu_results import Line, Results

HEADER = "| | goal, of what the card itself measures | measured |"
WORSE, BETTER = 0.97, 1.03  # ratios of times between which two runs count as equal


class Bar(NamedTuple):
    """A goal.

    cases: a pattern of the names of its cases. The worst of them counts. value: returns the figure that is compared
    with the goal; None where a line has none. lower: whether less is better.
    """

    name: str
    goal: float
    text: str
    stages: tuple[int, ...]
    cases: str
    value: Callable[[Line], float | None] = lambda line: line["fraction"]
    lower: bool = False


def idle(line: Line) -> float | None:
    return line.get("idle")


OF_TORCH = "0.90 of cuBLAS"  # the only goal that is a share of another case's speed: that of torch's own kernel
BARS = (
    Bar("batch 1, bf16", 0.80, "0.80", (3,), r"step llama 8B, plain, batch 1 at 512"),
    Bar("batch 1, fp8 and int8", 0.65, "0.65", (3,), r"step llama 8B, (fp8|int8), batch 1 at 512"),
    Bar("batch 1, int4-128", 0.45, "0.45", (3,), r"step llama 8B, int4-128, batch 1 at 512"),
    Bar("reading keys and values", 0.85, "0.85", (4,), r"attention triton, (8 x 131072|128 x 8192), 1 queries"),
    Bar("attention of prompts", 0.60, "0.60", (4,), r"attention triton, 1 x (\d+), \1 queries"),
    Bar("attention of prompts, torch's", 0.75, "0.75", (1,), r"prompt torchlib, \d+"),
    Bar("products of 1,024 tokens or more", 0.90, OF_TORCH, (2,), r"product triton, plain, .*, M (1024|4096)"),
    Bar("throughput, 1,000 tokens in and out", 0.70, "0.70 of the roofline", (5,), r"throughput llama 8B, plain, .*"),
    Bar("the GPU is idle, batch 1", 0.03, "at most 0.03", (3,), r"step llama 8B, .*, batch 1 at 512", idle, True),
    Bar("the GPU is idle, batch 64", 0.05, "at most 0.05", (3,), r"step llama 8B, .*, batch 64 at 512", idle, True),
    Bar("recurrent decode, state read and written", 0.80, "0.80", (3,), r"step mamba2 2.7B, .*"),
)  # fmt: skip


class Figure(NamedTuple):
    """The figure of a bar: the worst value of its cases, the number of cases, and how many of them were wrong."""

    bar: Bar
    value: float | None
    cases: int
    wrong: int

    def text(self) -> str:
        """Return the cell of a table; empty where nothing was measured."""
        if not self.cases:
            return ""
        of = f" (worst of {self.cases})" if self.cases > 1 else ""
        wrong = f"; {self.wrong} wrong" if self.wrong else ""
        return ("none" if self.value is None else f"{self.value:.2f}{of}") + wrong

    def verdict(self) -> str:
        if self.value is None or self.wrong:
            return "wrong" if self.wrong else "not measured"
        met = self.value <= self.bar.goal if self.bar.lower else self.value >= self.bar.goal
        return "met" if met else "missed"


def figures(lines: Sequence[Line]) -> list[Figure]:
    """Return the figure of each bar."""
    found = []
    by_name = {line["case"]: line for line in lines}
    for bar in BARS:
        own = [x for x in lines if x["stage"] in bar.stages and re.fullmatch(bar.cases, x["case"])]
        values = [v for line in own if line["gate"] and (v := _value(bar, line, by_name)) is not None]
        worst = (max if bar.lower else min)(values) if values else None
        found.append(Figure(bar, worst, len(own), sum(not line["gate"] for line in own)))
    return found


def _value(bar: Bar, line: Line, by_name: dict[str, Line]) -> float | None:
    if bar.text != OF_TORCH:
        return bar.value(line)
    peer = by_name.get(line["case"].replace("product triton", "product torchlib"))
    return peer["seconds"] / line["seconds"] if peer and peer["seconds"] and line["seconds"] else None


def latest(results: Results) -> list[Line]:
    """Return the lines of the newest commit and device that are no rehearsal; none if there are none."""
    runs = [run for run in results.runs() if not run[1].startswith("Triton's interpreter")]
    return list(results.of(*runs[-1])) if runs else []


def table(lines: Sequence[Line]) -> str:
    """Return the table of bars for docs/gpu.md."""
    rows = [f"| {f.bar.name} | {f.bar.text} | {f.text()} |" for f in figures(lines)]
    return "\n".join([HEADER, "|---|---|---|", *rows])


def write(results: Results, path: Path) -> None:
    """Replace the table of bars in a page. Raises ValueError if it has none."""
    text = path.read_text(encoding="utf-8")
    before, header, rest = text.partition(HEADER)
    if not header:
        raise ValueError(f"{path} has no table that begins with {HEADER!r}")
    after = re.sub(r"\A(\n\|[^\n]*)*", "", rest)
    path.write_text(before + table(latest(results)) + after, encoding="utf-8")


def report(results: Results, beside: str | None) -> str:
    """Return the bars, the cases that are wrong, every case, and perhaps an earlier commit beside it."""
    runs = results.runs()
    if not runs:
        return "nothing was measured: the file of results is empty"
    commit, device = runs[-1]
    lines = list(results.of(commit, device))
    parts = [f"{device}, commit {commit}", _ceilings(lines), _bars(lines), _wrong(lines), _cases(lines)]
    if beside is not None:
        parts.append(compare(list(results.of(beside, device)), lines, beside))
    return "\n\n".join(part for part in parts if part)


def _ceilings(lines: Sequence[Line]) -> str:
    found = []
    for line in (x for x in lines if x["stage"] == 0):
        rate = (
            (line["bytes"] if line["case"] == "copy" else line["flops"]) / line["seconds"] if line["seconds"] else None
        )
        unit = "TB/s" if line["case"] == "copy" else "TFLOP/s"
        found.append(f"{line['case']} " + ("not measured" if rate is None else f"{rate / 1e12:.4g} {unit}"))
    return "ceilings: " + ", ".join(found) if found else ""


def _bars(lines: Sequence[Line]) -> str:
    rows = [["goal", "wanted", "measured", ""]]
    rows += [[f.bar.name, f.bar.text, f.text() or "-", f.verdict()] for f in figures(lines)]
    return columns(rows)


def _wrong(lines: Sequence[Line]) -> str:
    found = [x for x in lines if not x["gate"]]
    why = [x.get("failed") or x.get("said") or f"error {x['error']}, allowed {x['allowed']}" for x in found]
    return "\n".join(f"WRONG: {x['case']}: {reason}" for x, reason in zip(found, why, strict=True))


def _cases(lines: Sequence[Line]) -> str:
    rows = [["case", "median", "10 to 90 %", "fraction", "of", "same bits", "graph"]]
    for line in lines:
        if line["seconds"] is None or not line["spread"]:
            continue
        median, low, high = line["spread"]
        fraction = "" if line["fraction"] is None else f"{line['fraction']:.3f}"
        same = {None: "", True: "yes", False: "no"}[line["same"]]
        rows.append(
            [line["case"], time_text(median), f"{time_text(low)} to {time_text(high)}", fraction, line["ceiling"] or "",
             same, "no" if "no_graph" in line else ""]
        )  # fmt: skip
    return columns(rows) if len(rows) > 1 else ""


def compare(before: Sequence[Line], now: Sequence[Line], name: str) -> str:
    """Return the cases that both commits have, with the times of both."""
    old = {line["case"]: line for line in before if line["seconds"]}
    rows = [["case", name, "now", "now / before", ""]]
    for line in now:
        if line["seconds"] and (other := old.get(line["case"])):
            ratio = line["seconds"] / other["seconds"]
            word = "slower" if ratio > BETTER else "faster" if ratio < WORSE else ""
            rows.append(
                [line["case"], time_text(other["seconds"]), time_text(line["seconds"]), f"{ratio:.3f}", word]
            )  # fmt: skip
    return columns(rows) if len(rows) > 1 else f"commit {name} has no case of this device in common"


def time_text(seconds: float) -> str:
    for unit, scale in (("s", 1.0), ("ms", 1e3)):
        if seconds * scale >= 1:
            return f"{seconds * scale:.4g} {unit}"
    return f"{seconds * 1e6:.4g} us"


def columns(rows: Sequence[Sequence[str]]) -> str:
    """Return rows of text as columns."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows)
