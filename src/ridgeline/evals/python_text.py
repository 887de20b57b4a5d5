"""Read Python texts as Python itself does: their lines and their syntax trees."""

from __future__ import annotations

import ast
import re
import warnings

LINE = re.compile(r"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+")  # Python's line ends; str.splitlines() accepts more


def parse(text: str) -> ast.Module | None:
    """Return the syntax tree, or None. Warnings are ignored, so that the result does not depend on warning filters."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
