"""An instruction set of kernels is in one list (csrc/dispatch.h), and its flags for the compiler in CMakeLists.txt."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def listed() -> list[str]:
    """Return the names in the list for x86, best first."""
    text = (ROOT / "csrc" / "dispatch.h").read_text(encoding="utf-8").split("#else")[0]
    return re.findall(r"^ +X\((\w+),", text, re.MULTILINE)


def test_what_is_listed_is_what_is_compiled() -> None:
    text = (ROOT / "CMakeLists.txt").read_text(encoding="utf-8")
    parts = re.findall(r"\b(?:set|list)\((?:APPEND )?isas ([\w ]+)\)", text)
    compiled = " ".join(parts).split()
    assert len(listed()) >= 3
    assert sorted(compiled) == sorted(listed())
    assert all(f"set(flags_{name}" in text for name in compiled)


def test_no_other_source_names_an_instruction_set() -> None:
    names = re.compile(rf"\b(?:{'|'.join(listed())})\b")
    for path in sorted((ROOT / "csrc").rglob("*.*")):
        lines = [line.split("//")[0] for line in path.read_text(encoding="utf-8").splitlines()]
        found = [line for line in lines if names.search(line)]
        assert path.name == "dispatch.h" or not found, (path.name, found)
