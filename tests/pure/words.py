"""The rules of CONTRIBUTING's glossary as data, and functions that find the sentences that a person reads."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

# A sentence that begins with one of these words is a fragment, or hides its subject.
FIRST_WORDS = ("Of", "What", "Who", "Whose", "The same", "That", "Those")
_FIRST = "|".join(FIRST_WORDS)
_BEGINS = re.compile(rf"(?:^|(?<=[.!?] ))({_FIRST})\b")
# `steps: of a run.` is a fragment too. A name and a colon begin the text, a line or a sentence.
_FIELD = re.compile(rf"(?:^|\. |\n\s*)`?[\w*]+`?(?:, `?[\w*]+`?)*: ({_FIRST.lower()})\b")


class Banned(NamedTuple):
    """A word that the glossary replaces. pattern: a regular expression. allowed: senses in which the word is right."""

    pattern: str
    instead: str
    allowed: str = r"$^"


BANNED: dict[str, Banned] = {
    "turned": Banned(r"turned", "rotated, transposed", r"turned (on|off|into|out|around)"),
    "recall": Banned(r"recall(s|ed)?", "read_state", r"recall (of|and|from|on|at|is|as)|(needle|associative) recall"),
    "remember": Banned(r"remember(s|ed)?", "keep, store, write_state"),
    "cruise": Banned(r"cruis\w+", "fast_forward"),
    "soil": Banned(r"soil\w*", "poison"),
    "place": Banned(
        r"places?",
        "slot, position, stream, folder",
        r"in (its )?place|takes? (the )?place|took place|decimal places?|to place|places? (it|them|the|a|each)\b",
    ),
    "books": Banned(r"books", "bookkeeping, tables"),
    "bears": Banned(r"bears", "allows, holds"),
    "British spelling": Banned(
        r"\w*(quantis|normalis|tokenis|initialis|optimis|serialis|sanitis|vectoris|recognis|organis)\w*|"
        r"(neighbour|colour|behaviour|favour)\w*|centre[ds]?|licence",
        "the American spelling",
    ),
}


def faults(text: str) -> Iterator[str]:
    """Yield one line for each rule that a text breaks. Code in backticks is not looked at."""
    plain = re.sub(r"``[^`]*``|`[^`\n]*`", "CODE", text)
    flat = re.sub(r"\s+", " ", plain).strip()
    for found in _BEGINS.finditer(flat):
        yield f"a sentence begins with {found[1]!r}: {flat[found.start() : found.start() + 70]!r}"
    for found in _FIELD.finditer(plain):
        yield f"a description begins with {found[1]!r}: {plain[found.start() : found.start() + 70]!r}"
    for word, rule in BANNED.items():
        right = [m.span() for m in re.finditer(rule.allowed, flat, re.IGNORECASE)]
        for found in re.finditer(rf"\b({rule.pattern})\b", flat, re.IGNORECASE):
            if not any(a <= found.start() and found.end() <= b for a, b in right):
                around = flat[max(0, found.start() - 30) : found.end() + 30]
                yield f"{word}: say {rule.instead} instead in {around!r}"


def docstrings(source: str) -> Iterator[tuple[int, str]]:
    """Yield (line, text) of every docstring in Python source."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text is not None:
                yield getattr(node, "lineno", 1), text


def comments(source: str) -> Iterator[tuple[int, str]]:
    """Yield (line, text) of every comment in Python source; adjacent lines in one column are one comment."""
    begin, last, column, lines = 0, 0, 0, list[str]()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        if lines and token.start != (last + 1, column):
            yield begin, " ".join(lines)
            lines = []
        if not lines:
            begin, column = token.start
        last = token.start[0]
        lines.append(token.string.lstrip("#- ").rstrip("- "))
    if lines:
        yield begin, " ".join(lines)


def headings(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (line, text) of every heading of a Markdown file; lines of code are none."""
    code = False
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        code ^= line.startswith("```")
        if not code and (found := re.match(r"#+ (.*)", line)):
            yield number, found[1]
