"""Print tables and text for terminals of any width. No number is cut, and nothing is left out without a note.

A table that is too wide drops whole columns, in an order that the columns define, and names them below. If it is still
too wide, every row becomes a record with one line per cell. Text breaks only between words, never between a number and
its unit. Output to a file or a pipe has no width limit unless the environment variable COLUMNS sets one.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

Cell = str | Text  # a str is printed as it is: it holds no markup

UNLIMITED = 1_000_000  # width of output that does not go to a terminal
GAP = 2  # spaces between two columns
LEAST_TEXT = 20  # least width of a column of sentences
INDENT = 2  # indentation of a record's lines below the first

_UNITS = r"[kMGTPE]?i?B(?:/s)?|[kMGTPE]?FLOP(?:/s)?|ms|us|ns|s|x|%|tokens(?:/s)?"
_WORDS = re.compile(rf"\S*\d (?:{_UNITS})(?![\w/])\S*|\S+")  # a number and its unit are one word


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table.

    right: align the cells to the right. wraps: the cells are sentences, which may take several lines. drop: rank in the
    order in which columns are dropped, smallest first; None: never dropped. style: rich style of the cells.
    """

    name: str
    right: bool = True
    wraps: bool = False
    drop: int | None = None
    style: str = ""


@dataclass(frozen=True, slots=True)
class Layout:
    """How a table is shown at a width. shown: indices of the shown columns. widths: their widths. records: show one
    cell a line.
    """

    shown: tuple[int, ...]
    widths: tuple[int, ...]
    records: bool = False


@dataclass(slots=True)
class Table:
    """Rows of cells under a title, for `show`. has_header: print the names of the columns."""

    title: str
    columns: Sequence[Column]
    has_header: bool = True
    rows: list[tuple[Text, ...]] = field(default_factory=list)

    def add_row(self, *cells: Cell, style: str = "") -> None:
        """Add a row with one cell for each column. style: rich style of all its cells."""
        styles = [f"{column.style} {style}".strip() for column in self.columns]
        pairs = zip(cells, styles, strict=True)
        self.rows.append(tuple(Text(c, s) if isinstance(c, str) else c for c, s in pairs))

    def layout(self, width: int) -> Layout:
        """Return the layout with the most columns that fits into a width."""
        shown = list(range(len(self.columns)))
        least, full = [self._least(i) for i in shown], [self._full(i) for i in shown]
        droppable = [(c.drop, i) for i, c in enumerate(self.columns) if c.drop is not None]
        for i in (None, *(i for _, i in sorted(droppable))):
            if i is not None:
                shown.remove(i)
            if sum(least[i] + GAP for i in shown) - GAP <= width:
                return Layout(tuple(shown), self._widths(shown, width, least, full))
        return Layout(tuple(range(len(self.columns))), (), records=True)

    def dropped(self, width: int) -> list[str]:
        """Return the names of the columns that do not fit into a width."""
        shown = self.layout(width).shown
        return [column.name for i, column in enumerate(self.columns) if i not in shown]

    def lines(self, width: int) -> Iterator[Text]:
        """Yield the lines of the table at a width."""
        layout = self.layout(width)
        yield from wrapped(Text(self.title, "bold"), width) if self.title else ()
        if layout.records:
            for row in self.rows:
                yield from self._record(row, width)
            return
        if self.has_header:
            yield from self._line([Text(self.columns[i].name, "bold") for i in layout.shown], layout)
        for row in self.rows:
            yield from self._line([row[i] for i in layout.shown], layout)
        if dropped := [column.name for i, column in enumerate(self.columns) if i not in layout.shown]:
            enough = sum(self._least(i) + GAP for i in range(len(self.columns))) - GAP
            names = ", ".join(dropped)
            yield from wrapped(
                Text(f"Not shown: {names}. A width of {enough} columns shows every column.", "dim"), width
            )

    def _cells(self, i: int) -> list[Text]:
        return [row[i] for row in self.rows]

    def _least(self, i: int) -> int:
        """Return the smallest width of a column."""
        column, name = self.columns[i], self.columns[i].name if self.has_header else ""
        word = max((cell_len(w) for w in _WORDS.findall(name)), default=0)
        if not column.wraps:
            return max((word, *(cell.cell_len for cell in self._cells(i))))
        words = [cell_len(w) for cell in self._cells(i) for w in _WORDS.findall(cell.plain)]
        return max((word, *words, min(self._full(i), LEAST_TEXT)))

    def _full(self, i: int) -> int:
        """Return the width of a column if each of its cells takes one line."""
        name = self.columns[i].name if self.has_header else ""
        return max((cell_len(name), *(cell.cell_len for cell in self._cells(i))))

    def _widths(self, shown: Sequence[int], width: int, least: Sequence[int], full: Sequence[int]) -> tuple[int, ...]:
        """Return the width of each column: its smallest, plus a share of the free width. Columns of sentences get
        theirs last.
        """
        found = {i: least[i] for i in shown}
        free = width - sum(found.values()) - GAP * (len(shown) - 1)
        for i in sorted(shown, key=lambda i: self.columns[i].wraps):
            more = min(free, full[i] - found[i])
            found[i], free = found[i] + more, free - more
        return tuple(found.values())

    def _line(self, cells: Sequence[Text], layout: Layout) -> Iterator[Text]:
        """Yield the lines of one row, which takes several if a cell does."""
        parts = [wrapped(cell, width) for cell, width in zip(cells, layout.widths, strict=True)]
        for pieces in zip_longest(*parts, fillvalue=Text()):
            line = Text()
            for piece, i, width in zip(pieces, layout.shown, layout.widths, strict=True):
                padding = " " * (width - piece.cell_len)
                line.append(padding if self.columns[i].right else "")
                line.append_text(piece)
                line.append("" if self.columns[i].right else padding)
                line.append(" " * GAP)
            line.rstrip()
            yield line

    def _record(self, row: Sequence[Text], width: int) -> Iterator[Text]:
        """Yield one row as a record: its first cell, then a line for each other cell that is not empty."""
        yield from wrapped(row[0], width)
        names = max(cell_len(column.name) for column in self.columns[1:]) if len(row) > 1 else 0
        for column, cell in zip(self.columns[1:], row[1:], strict=True):
            if not cell.plain:
                continue
            head = column.name if self.has_header else ""
            label = Text(" " * INDENT + (head.ljust(names) + " " * GAP if head else ""))
            pieces = wrapped(cell, width - label.cell_len)
            if head and max(piece.cell_len for piece in pieces) > width - label.cell_len:
                yield Text(f"{' ' * INDENT}{head}")  # a word does not fit into the rest of the line
                label = Text(" " * 2 * INDENT)
                pieces = wrapped(cell, width - 2 * INDENT)
            for n, piece in enumerate(pieces):
                yield (label if n == 0 else Text(" " * label.cell_len)) + piece


@dataclass(slots=True)
class Line:
    """A line of text that wraps. indent: spaces before its second and later lines."""

    text: Cell
    indent: int = 0
    style: str = ""

    def lines(self, width: int) -> Iterator[Text]:
        """Yield the lines of the text at a width."""
        text = Text(self.text, self.style) if isinstance(self.text, str) else self.text
        indent = self.indent if self.indent < width // 2 else 0
        first, *rest = wrapped(text, width, width - indent)
        yield first
        yield from (Text(" " * indent) + line for line in rest)


def wrapped(text: Text, width: int, later: int | None = None) -> list[Text]:
    """Break a text into lines between words. A word that is longer than the width gets a line of its own.

    later: width of the lines after the first. Spaces before the first word and between two words of a line are kept.
    """
    if "\n" not in text.plain and text.cell_len <= width:
        return [text]
    lines: list[Text] = []
    for part in text.split("\n", allow_blank=True):
        start = end = 0
        for word in _WORDS.finditer(part.plain):
            limit = width if not lines or later is None else later
            if end > start and cell_len(part.plain[start : word.end()]) > limit and part.plain[start:end].strip():
                lines.append(part[start:end])
                start = word.start()
            end = word.end()
        lines.append(part[start:end])
    return lines


def screen(*, stderr: bool = False) -> Console:
    """Return the console of stdout or stderr, as wide as the terminal or COLUMNS; otherwise without a limit."""
    console = Console(stderr=stderr, highlight=False)
    if console.is_terminal or os.environ.get("COLUMNS", "").isdigit():
        return console
    return Console(stderr=stderr, highlight=False, width=UNLIMITED)


def show(console: Console, *parts: Table | Line | Cell) -> None:
    """Print texts and tables, with an empty line around each table."""
    after: Table | Line | None = None
    for given in parts:
        part = given if isinstance(given, Table | Line) else Line(given)
        if after is not None and (isinstance(part, Table) or isinstance(after, Table)):
            console.print()
        for line in part.lines(max(console.width, 1)):
            console.print(line, soft_wrap=True)
        after = part
