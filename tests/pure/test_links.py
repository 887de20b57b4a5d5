"""Check that each link of the documentation has a target: a file of the repository, and a heading in it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
LINK = re.compile(r"\]\((?!\w+:)([^)#\s]*)(?:#([^)\s]*))?\)")


def without_blocks(page: Path) -> str:
    """Return the text of a page without its blocks of code."""
    text = page.read_text(encoding="utf-8")
    return re.sub(r"^( *)(```+|~~~+).*?^\1\2`*\s*$", "", text, flags=re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """Return the names that sites give to the headings of a page: lower case, without marks, with dashes for spaces."""
    names: list[str] = []
    for heading in re.findall(r"^#+ (.*)$", without_blocks(page), re.MULTILINE):
        plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower()
        names.append(re.sub(r"[^\w\- ]", "", plain).strip().replace(" ", "-"))
    return {*names, *(f"{name}-{i}" for name in names for i in range(1, names.count(name)))}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_each_link_has_a_target(page: Path) -> None:
    broken = []
    for target, anchor in LINK.findall(re.sub(r"`[^`\n]*`", "", without_blocks(page))):
        file = (page.parent / target).resolve() if target else page
        if not file.exists():
            broken.append(f"{target}: there is no such file")
        elif anchor and file.suffix == ".md" and anchor not in anchors(file):
            broken.append(f"{target}#{anchor}: there is no such heading")
    assert not broken, "\n".join(broken)
