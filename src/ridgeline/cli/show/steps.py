"""Show the progress of a command that runs in named steps."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

PAUSE_S = 30.0


@contextmanager
def step_bar() -> Iterator[Callable[[str, int, int], None]]:
    """Show what is being done: a bar on a terminal, and a line twice a minute on anything else."""
    if not sys.stderr.isatty():
        yield _Lines().show
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    from ridgeline.cli.show.progress import error_console

    columns = TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn()
    bar = Progress(*columns, console=error_console(), transient=True, redirect_stdout=False)
    task = bar.add_task("reading", total=None)
    with bar:
        yield lambda what, done, total: bar.update(task, description=what, completed=done, total=total)


class _Lines:
    """Writes lines of progress to stderr, with PAUSE_S seconds between them."""

    def __init__(self) -> None:
        self._last = time.monotonic()

    def show(self, what: str, done: int, total: int) -> None:
        """Write a line if it is time for one."""
        if time.monotonic() - self._last >= PAUSE_S:
            self._last = time.monotonic()
            print(f"{what}, {done:,} of {total:,}", file=sys.stderr, flush=True)
