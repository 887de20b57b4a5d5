"""Progress bars, on stderr, and only where somebody sees them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

BIG = 1 << 28  # bytes: less than this loads before a bar could be read


def error_console() -> Console:
    return Console(stderr=True)


@contextmanager
def loading_bar() -> Iterator[Callable[[int], Callable[[int], None]]]:
    """For `LLM(progress_bar=...)`: a bar in bytes for models that take a while."""
    bar = Progress(
        TextColumn("loading"), BarColumn(), DownloadColumn(binary_units=True), TimeRemainingColumn(),
        console=error_console(), transient=True, disable=not sys.stderr.isatty(),
    )  # fmt: skip

    def start(total: int) -> Callable[[int], None]:
        if total < BIG:
            return lambda done: None
        task = bar.add_task("loading", total=total)
        return lambda done: bar.advance(task, done)

    with bar:
        yield start


@contextmanager
def prompts_bar(total: int) -> Iterator[Callable[[], None]]:
    """A bar over the prompts of a file; call what it gives once per finished prompt."""
    bar = Progress(
        TextColumn("prompts"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
        console=error_console(), transient=True, disable=not sys.stderr.isatty(),
    )  # fmt: skip
    task = bar.add_task("prompts", total=total)
    with bar:
        yield lambda: bar.advance(task)
