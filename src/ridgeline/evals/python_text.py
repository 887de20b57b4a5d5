"""Python texts as Python itself reads them: their lines, and their syntax trees."""

from __future__ import annotations

import ast
import re
import warnings

LINE = re.compile(r"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+")  # as Python counts them: str.splitlines() knows more ends


def parse(text: str) -> ast.Module | None:
    """The syntax tree, or None. Warnings are off: as errors they would make a corpus depend on a filter."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
