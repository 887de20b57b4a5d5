"""An instruction set of kernels is in one list (csrc/dispatch.h), and its flags for the compiler in CMakeLists.txt."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def listed() -> dict[str, list[str]]:
    """Return the names in the lists for x86 and ARM, best first."""
    text = (ROOT / "csrc" / "dispatch.h").read_text(encoding="utf-8").split("#else")[0]
    parts = text.split("#elif defined(__aarch64__)")
    return {
        machine: re.findall(r"^ +X\((\w+),", part, re.MULTILINE)
        for machine, part in zip(("x86", "ARM"), parts, strict=True)
    }


def all_names() -> set[str]:
    return {name for names in listed().values() for name in names}


def test_what_is_listed_is_what_is_compiled() -> None:
    text = (ROOT / "CMakeLists.txt").read_text(encoding="utf-8")
    everywhere, *parts = re.findall(r"\b(?:set|list)\((?:APPEND )?isas ([\w ]+)\)", text)
    for names, part in zip(listed().values(), parts, strict=True):
        assert len(names) >= 3
        assert sorted(f"{everywhere} {part}".split()) == sorted(names)
    assert all(f"set(flags_{name}" in text for name in all_names())


def test_no_other_source_names_an_instruction_set() -> None:
    names = re.compile(rf"\b(?:{'|'.join(all_names())})\b")
    for path in sorted((ROOT / "csrc").rglob("*.*")):
        lines = [line.split("//")[0] for line in path.read_text(encoding="utf-8").splitlines()]
        found = [line for line in lines if names.search(line)]
        assert path.name == "dispatch.h" or not found, (path.name, found)
