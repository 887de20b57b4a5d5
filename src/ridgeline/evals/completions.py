"""Does a model of Python write functions: a criterion that only reads what it wrote, and never runs it.

A model gets the header of a function, `def` to colon, and goes on for a while. Its answer passes if enough of it, from
the start, is Python that parses: a body of at least LEAST_STATEMENTS statements that reaches over at least
LEAST_COVERED of the answer. The rest may be cut off in the middle, as answers of a fixed length are.

This asks for grammar, not for sense: `a` parses, and what repeats one line passes. Read some answers beside the figure.
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from ridgeline.evals.python_text import parse

LEAST_STATEMENTS = 2
LEAST_COVERED = 0.6  # of the bytes of a completion

_OPEN, _CLOSE = frozenset("([{"), frozenset(")]}")


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the longest prefix of header and completion holds that parses; see `judge`.

    num_statements: beside the function of the header. covered: bytes of the completion inside the prefix over all of
    its bytes, in UTF-8; 0 where there are none.
    """

    num_statements: int
    covered: float

    @property
    def passed(self) -> bool:
        return self.num_statements >= LEAST_STATEMENTS and self.covered >= LEAST_COVERED


def judge(header: str, completion: str) -> Verdict:
    """Judge what a model wrote after a header (see `function_headers`); the two are joined as they are.

    The prefix is the longest one, over all character positions, that holds the whole header and that `ast.parse` takes.
    Warnings do not count; what Python cannot read for its depth, its size or a NUL does not parse. Statements are all
    `ast.stmt` nodes at any depth but the function of the header: a docstring is one, an `if` with one statement inside
    is two, and what follows the function counts like its body.

    Where no prefix parses there is no statement and nothing is covered; an empty completion is such a case. Blank lines
    and comments at the end of a prefix are covered. A prefix may end inside a word, which is then a name: an answer
    that was cut off inside `return color` is covered to its end, and where a line holds `class` and no more, `clas` is
    a statement.
    """
    end = parsed_length(header, completion)
    if end is None:
        return Verdict(0, 0.0)
    tree = parse(header + completion[:end])
    statements = sum(isinstance(node, ast.stmt) for node in ast.walk(tree)) if tree else 0
    size = _num_bytes(completion)
    return Verdict(statements - 1, _num_bytes(completion[:end]) / size if size else 0.0)


def parsed_length(header: str, completion: str) -> int | None:
    """Characters of the completion inside the longest prefix that parses; None where none does."""
    text = header + completion
    return next((end - len(header) for end in range(len(text), len(header) - 1, -1) if parse(text[:end])), None)


def function_headers(text: str) -> list[str]:
    """The headers of a Python file's functions in the order of the file, inner ones and methods included.

    From `def` or `async def` to the colon that ends the signature, as written, comments inside it too; without
    decorators. The indentation of the `def` is taken off every line but those that begin inside a string. Line ends are
    "\\n", as the parser sees them. A text that does not parse has none.
    """
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    if parse(text) is None:
        return []
    lines = text.split("\n")
    tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))
    # A string of several lines; since Python 3.12 the pieces of an f-string.
    inside = {row for t in tokens for row in range(t.start[0] + 1, t.end[0] + 1)}
    headers = []
    for i, token in enumerate(tokens):
        if token.type == tokenize.NAME and token.string == "def":
            first = tokens[i - 1] if i and tokens[i - 1].string == "async" else token
            headers.append(_cut(lines, first.start, _colon(tokens[i:]), inside))
    return headers


def _colon(tokens: Iterable[tokenize.TokenInfo]) -> tuple[int, int]:
    """Where the signature ends that begins here, after its colon: line from 1 and column from 0, in characters."""
    depth = lambdas = 0
    for token in tokens:
        if token.type == tokenize.OP:
            depth += (token.string in _OPEN) - (token.string in _CLOSE)
        if depth:
            continue
        if token.type == tokenize.NAME and token.string == "lambda":  # a bare one may be the annotation of the result
            lambdas += 1
        elif token.type == tokenize.OP and token.string == ":":
            if not lambdas:
                return token.end
            lambdas -= 1
    raise AssertionError("a file that parses has a function without a colon")


def _cut(lines: Sequence[str], start: tuple[int, int], end: tuple[int, int], inside: Collection[int]) -> str:
    """The text between two places, without the indentation of the first line; `inside`: lines to leave alone."""
    (first, column), (last, stop) = start, end
    if first == last:
        return lines[first - 1][column:stop]
    indent = lines[first - 1][:column]
    whole = [lines[first - 1], *lines[first : last - 1], lines[last - 1][:stop]]
    return "\n".join(line if row in inside else _dedent(line, indent) for row, line in enumerate(whole, first))


def _dedent(line: str, indent: str) -> str:
    """Without the indent, or without all blanks at the start where the line has another one."""
    return line[len(indent) :] if line.startswith(indent) else line.lstrip(" \t\f")


def _num_bytes(text: str) -> int:
    return len(text.encode("utf-8", "surrogatepass"))
