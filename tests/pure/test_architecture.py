"""ARCHITECTURE.md is short and names every package, and each file and function that it names exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import ridgeline

SOURCE = Path(ridgeline.__file__).parent
ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")


def names_of(path: Path) -> set[str]:
    """Return the functions, classes and methods (`Class.method`) that a file defines."""
    found = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            inner = (n for n in node.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))
            found |= {f"{node.name}.{n.name}" for n in inner}
    return found


def missing(text: str) -> list[str]:
    """Return the names `folder/file.py` or `folder/file.py:name` of a text that the package does not have."""
    found = []
    for name, function in re.findall(r"`([\w/]+\.py)(?::([\w.]+))?`", text):
        if "NAME" in name:  # a placeholder for a file that a reader adds
            continue
        path = next((p for p in (SOURCE / name, ROOT / name) if p.exists()), None)
        if path is None or (function and function not in names_of(path)):
            found.append(f"{name}:{function}")
    return found


def test_the_map_is_short() -> None:
    assert len(TEXT.splitlines()) <= 120


def test_every_package_has_its_line() -> None:
    rows = "".join(line.split("|")[1] for line in TEXT.splitlines() if line.startswith("| `"))
    listed = set(re.findall(r"`([\w.]+)/?`", rows))
    there = {p.name for p in SOURCE.iterdir() if (p / "__init__.py").exists() or p.suffix == ".py"}
    assert there - {"__init__.py", "__main__.py"} == listed


def test_every_file_and_function_is_there() -> None:
    assert len(re.findall(r"`[\w/]+\.py:[\w.]+`", TEXT)) > 20
    assert not missing(TEXT)
    assert not missing((ROOT / "docs" / "design.md").read_text(encoding="utf-8"))
    assert missing("`sched/pages.py:PagePool.forget` `sched/pages.py:PagePool.take` `sched/nothing.py`") == [
        "sched/pages.py:PagePool.forget",
        "sched/nothing.py:",
    ]


def test_every_package_says_what_belongs_in_it() -> None:
    bare = [p for p in SOURCE.rglob("__init__.py") if not ast.get_docstring(ast.parse(p.read_text(encoding="utf-8")))]
    assert not bare, bare
