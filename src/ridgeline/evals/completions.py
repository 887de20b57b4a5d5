"""Judge whether a model writes valid Python functions, by parsing its output without running it.

The model gets the header of a function, from `def` to the colon, and continues it. The answer passes if a prefix of it
parses that has at least LEAST_STATEMENTS statements and covers at least LEAST_COVERED of the answer. The rest may be
cut off, as in answers of a fixed length.

This checks grammar, not meaning: `a` parses, and repeated lines pass. Read some answers as well.
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from ridgeline.evals.python_text import parse

LEAST_STATEMENTS = 2
LEAST_COVERED = 0.6  # share of a completion's bytes

_OPEN, _CLOSE = frozenset("([{"), frozenset(")]}")


@dataclass(frozen=True, slots=True)
class Verdict:
    """The longest prefix of header and completion that parses; see `judge`.

    num_statements: statements besides the header's function. covered: bytes of the completion inside the prefix,
    divided by all of its bytes in UTF-8; 0 for an empty completion.
    """

    num_statements: int
    covered: float

    @property
    def passed(self) -> bool:
        return self.num_statements >= LEAST_STATEMENTS and self.covered >= LEAST_COVERED


def judge(header: str, completion: str) -> Verdict:
    """Judge a model's completion of a header (see `function_headers`). The two are joined without a separator.

    The prefix is the longest one, over all character positions, that contains the whole header and that `ast.parse`
    accepts. Warnings are ignored. Text that is too deep or too large for Python, or contains NUL, does not parse. All
    `ast.stmt` nodes at any depth are statements, except for the function of the header: a docstring counts one, an `if`
    with one statement inside counts two, and code after the function counts as well.

    If no prefix parses, there are no statements and nothing is covered; so it is for an empty completion. Blank lines
    and comments at the end of a prefix are covered. A prefix may end inside a word, which is then a name: an answer
    that was cut inside `return color` is covered completely, and a line with only `class` gives the statement `clas`.
    """
    end = parsed_length(header, completion)
    if end is None:
        return Verdict(0, 0.0)
    tree = parse(header + completion[:end])
    statements = sum(isinstance(node, ast.stmt) for node in ast.walk(tree)) if tree else 0
    size = _num_bytes(completion)
    return Verdict(statements - 1, _num_bytes(completion[:end]) / size if size else 0.0)


def parsed_length(header: str, completion: str) -> int | None:
    """Return the number of the completion's characters in the longest prefix that parses, or None if none does."""
    text = header + completion
    return next((end - len(header) for end in range(len(text), len(header) - 1, -1) if parse(text[:end])), None)


def function_headers(text: str) -> list[str]:
    """Return the headers of a Python file's functions in file order, with inner functions and methods.

    A header goes from `def` or `async def` to the colon that ends the signature, with comments and without decorators.
    The indentation of the `def` is removed from every line that does not begin inside a string. Line ends become "\\n",
    as in the parser. A text that does not parse has no headers.
    """
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    if parse(text) is None:
        return []
    lines = text.split("\n")
    tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))
    # Lines that begin inside a multi-line string or, since Python 3.12, between the pieces of an f-string.
    inside = {row for t in tokens for row in range(t.start[0] + 1, t.end[0] + 1)}
    headers = []
    for i, token in enumerate(tokens):
        if token.type == tokenize.NAME and token.string == "def":
            first = tokens[i - 1] if i and tokens[i - 1].string == "async" else token
            headers.append(_cut(lines, first.start, _colon(tokens[i:]), inside))
    return headers


def _colon(tokens: Iterable[tokenize.TokenInfo]) -> tuple[int, int]:
    """Return the position after the colon that ends the signature: line from 1, and column from 0 in characters."""
    depth = lambdas = 0
    for token in tokens:
        if token.type == tokenize.OP:
            depth += (token.string in _OPEN) - (token.string in _CLOSE)
        if depth:
            continue
        if token.type == tokenize.NAME and token.string == "lambda":  # may be the annotation of the result
            lambdas += 1
        elif token.type == tokenize.OP and token.string == ":":
            if not lambdas:
                return token.end
            lambdas -= 1
    raise AssertionError("a file that parses has a function without a colon")


def _cut(lines: Sequence[str], start: tuple[int, int], end: tuple[int, int], inside: Collection[int]) -> str:
    """Return the text between two positions without the indentation of the first line. inside: lines to keep
    unchanged.
    """
    (first, column), (last, stop) = start, end
    if first == last:
        return lines[first - 1][column:stop]
    indent = lines[first - 1][:column]
    whole = [lines[first - 1], *lines[first : last - 1], lines[last - 1][:stop]]
    return "\n".join(line if row in inside else _dedent(line, indent) for row, line in enumerate(whole, first))


def _dedent(line: str, indent: str) -> str:
    """Remove the indentation, or all leading white space if the line is indented differently."""
    return line[len(indent) :] if line.startswith(indent) else line.lstrip(" \t\f")


def _num_bytes(text: str) -> int:
    return len(text.encode("utf-8", "surrogatepass"))
