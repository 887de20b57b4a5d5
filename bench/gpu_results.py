"""Results of bench/gpu.py: one JSON line a case. The last one of a commit, a device, a stage and a case counts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Line = dict[str, Any]
KEY = ("commit", "device", "stage", "case")


class Results:
    """Lines of a file."""

    def __init__(self, path: Path) -> None:
        """Read a file, if it exists. Raises ValueError for a line that is no result."""
        self._path = path
        self._lines: dict[tuple[Any, ...], Line] = {}
        texts = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        for number, text in enumerate(texts, 1):
            line = json.loads(text)
            if missing := [name for name in KEY if name not in line]:
                raise ValueError(
                    f"{path}, line {number}: {missing[0]} is missing, so this is no result of bench/gpu.py"
                )
            self._keep(line)

    def _keep(self, line: Line) -> None:
        key = tuple(line[name] for name in KEY)
        self._lines.pop(key, None)  # the last line of the dict is the newest one
        self._lines[key] = line

    def add(self, line: Line) -> None:
        """Write a line at once, so that nothing is lost if the next case ends the process."""
        self._keep(line)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, allow_nan=False) + "\n")

    def has(self, commit: str, device: str, stage: int, case: str) -> bool:
        return (commit, device, stage, case) in self._lines

    def runs(self) -> list[tuple[str, str]]:
        """Return (commit, device) of all lines, the newest last."""
        found: dict[tuple[str, str], None] = {}
        for commit, device, _, _ in self._lines:
            found.pop((commit, device), None)
            found[commit, device] = None
        return list(found)

    def of(self, commit: str, device: str) -> Iterator[Line]:
        """Yield the lines of a commit and a device."""
        for line in self._lines.values():
            if (line["commit"], line["device"]) == (commit, device):
                yield line
