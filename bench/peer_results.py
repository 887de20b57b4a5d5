"""Read results and notes: measured lines by kind of machine, and remarks about them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from peer_rounds import limits_of_run, summary
from peer_table import CASES, LOWER_IS_BETTER, MACHINES, OURS, Contender

NOTES = Path(__file__).with_name("peer_notes.json")
Line = dict[str, Any]


class Results:
    """Lines of a file. The latest line of a kind of machine, shape, case and contender counts."""

    def __init__(self, path: Path) -> None:
        """Read a file. Raises ValueError for a line without the kind of its machine."""
        self._path = path
        self._lines: dict[tuple[str, str, str, str], Line] = {}
        texts = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        for number, text in enumerate(texts, 1):
            line = json.loads(text)
            if "machine_kind" not in line:
                raise ValueError(f"{path}, line {number}: no machine_kind, so an older version wrote it; move the file")
            self._keep(line)

    def _keep(self, line: Line) -> None:
        name = f"{line['what']} {line['weights']}" if "weights" in line else line["what"]
        self._lines[line["machine_kind"], line["shape"], name, line.get("contender", "")] = line

    def add(self, line: Line) -> None:
        self._keep(line)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def of(self, machine: str) -> Section:
        """Return the results of a kind of machine, with those that are added later."""
        return Section(machine, lambda: [line for line in self._lines.values() if line["machine_kind"] == machine])

    def sections(self) -> list[Section]:
        return [self.of(machine.name) for machine in MACHINES]


class Section:
    """The results of one kind of machine."""

    def __init__(self, name: str, lines: Callable[[], list[Line]]) -> None:
        self.machine = next(machine for machine in MACHINES if machine.name == name)
        self._raw = lines
        self._read: list[Line] = []
        self._summaries: list[Line] = []

    def lines(self) -> list[Line]:
        """Return all results, with medians over the rounds that count (`peer_rounds.summary`)."""
        raw = self._raw()
        if raw == self._read:
            return self._summaries
        runs = {run: limits_of_run(line for line in raw if line["run"] == run) for run in {line["run"] for line in raw}}
        self._read, self._summaries = raw, [summary(line, runs[line["run"]]) for line in raw]
        return self._summaries

    def select(self, shape: str, case: str) -> list[Line]:
        return [line for line in self.lines() if (line["shape"], line["what"]) == (shape, case)]

    def contenders(self, shape: str, case: str) -> set[str]:
        """Return the contenders with a line, errors included."""
        return {line.get("contender", "") for line in self.select(shape, case)}

    def gate(self, shape: str, contender: Contender) -> bool:
        """Return whether Ridgeline's tokens passed; those of a peer are not checked."""
        if contender.peer != OURS:
            return True
        return any(line["correct"] for line in self.select(shape, "gate") if line["contender"] == contender.name)

    def limits(self, shape: str) -> dict[str, float]:
        """Return the machine's limits that were measured with a shape's cases: those of the median bandwidth."""
        lines = [line for line in self.lines() if line["shape"] == shape and line["what"] in CASES]
        found = sorted((line["limits"] for line in lines if "limits" in line), key=lambda limits: limits["read_gb_s"])
        return found[len(found) // 2] if found else {}

    def errors(self) -> Iterator[str]:
        """Yield what failed: shape, contender and reason, and the cases if it was not all of them."""
        found: dict[str, list[str]] = {}
        for line in self.lines():
            if "error" in line and "contender" in line:
                found.setdefault(f"{line['shape']} {line['contender']}: {line['error']}", []).append(line["what"])
        yield from (f"{text} ({', '.join(dict.fromkeys(cases))})" for text, cases in found.items())

    def left_out(self) -> Iterator[str]:
        """Yield the rounds that do not count, with the reason."""
        found = {
            (line["shape"], line["what"], number): why
            for line in self.lines()
            for number, why in line["left_out"].items()
        }
        yield from (f"{shape} {case}, round {number}: {why}" for (shape, case, number), why in found.items())


def best(lines: Sequence[Line], value: str) -> Line | None:
    """Return the line with the best value, or None if none has it."""
    there = [line for line in lines if value in line]
    choose = min if value in LOWER_IS_BETTER else max
    return choose(there, key=lambda line: line[value]) if there else None


def version_of(lines: Sequence[Line]) -> str:
    return next((line["version"] for line in lines if line.get("version")), "")


def base_of(line: Line) -> str:
    """Return a contender's name without its setting."""
    return str(line.get("contender", "")).partition(" [")[0]


class Notes:
    """Holds what people wrote about a kind of machine: paragraphs, figures of an earlier build, causes of misses."""

    def __init__(self, of_machine: Mapping[str, Any]) -> None:
        self.about: Sequence[str] = of_machine.get("about", ())
        self._earlier: Sequence[Mapping[str, Any]] = of_machine.get("earlier", ())
        self._causes: Sequence[Mapping[str, Any]] = of_machine.get("causes", ())

    @property
    def has_earlier(self) -> bool:
        return bool(self._earlier)

    def earlier(self, shape: str, case: str, value: str, kind: str) -> list[str]:
        """Return Ridgeline's figure, the best peer's and their ratio in an earlier build, or three empty cells."""
        key = {"shape": shape, "case": case, "value": value, "kind": kind}
        return next((list(e["figures"]) for e in self._earlier if key.items() <= e.items()), ["", "", ""])

    def cause(self, shape: str, case: str, value: str, kind: str) -> str:
        """Return the cause of a miss; "" if nobody wrote one. An entry without a field is about all of its values."""
        for entry in self._causes:
            given = {"shapes": shape, "cases": case, "values": value, "kinds": kind}
            if all(name not in entry or wanted in entry[name] for name, wanted in given.items()):
                return str(entry["text"])
        return ""


def read_notes(path: Path = NOTES) -> dict[str, Notes]:
    """Return the notes of every kind of machine."""
    texts = json.loads(path.read_text(encoding="utf-8"))
    return {machine.name: Notes(texts.get(machine.name, {})) for machine in MACHINES}
