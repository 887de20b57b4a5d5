"""Progress bars on stderr, shown only on a terminal. A bar that is not shown imports nothing."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, ProgressColumn

    from ridgeline.sched.stats import StepShape

BIG = 1 << 28  # bytes; smaller models load before a bar could be read


def error_console() -> Console:
    """Return the console of stderr."""
    from ridgeline.cli.show.tables import screen

    return screen(stderr=True)


def _bar(*columns: ProgressColumn, shown: bool) -> Progress:
    from rich.progress import Progress

    # Without redirect_stdout=False, rich would print stdout's text on the bar's console, which is stderr.
    return Progress(*columns, console=error_console(), transient=True, disable=not shown, redirect_stdout=False)


@contextmanager
def loading_bar() -> Iterator[Callable[[int], Callable[[int], None]]]:
    """Yield a function for `LLM(progress_bar=...)` that shows a bar in bytes while a large model loads."""
    with ExitStack() as shown:

        def start(total: int) -> Callable[[int], None]:
            if total < BIG or not sys.stderr.isatty():
                return lambda done: None
            from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn

            columns = TextColumn("loading"), BarColumn(), DownloadColumn(binary_units=True), TimeRemainingColumn()
            bar = shown.enter_context(_bar(*columns, shown=True))
            task = bar.add_task("loading", total=total)
            return lambda done: bar.advance(task, done)

        yield start


@contextmanager
def requests_bar(total: int) -> Iterator[Callable[[], None]]:
    """Show a bar over the requests of a simulation. Yields a function to call after each request.

    The bar is redrawn only a few hundred times, so that it costs almost nothing.
    """
    if not sys.stderr.isatty():
        yield lambda: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn

    bar = _bar(TextColumn("requests"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), shown=True)
    task, stride, count = bar.add_task("requests", total=total), max(1, total // 300), 0

    def request_done() -> None:
        nonlocal count
        count += 1
        if count % stride == 0:
            bar.update(task, completed=count)

    with bar:
        yield request_done


class PrefillBar:
    """A progress bar over prompt tokens, for prompts that need several prefill steps. Call `close` before printing
    anything.

    total: tokens of all prompts. chunk: most tokens of one step, or None if unknown. Nothing is shown if the prompts
    fit into one step, or without a terminal.
    """

    def __init__(self, total: int, chunk: int | None) -> None:
        self.is_shown = sys.stderr.isatty() and chunk is not None and total > chunk
        self._bar: Progress | None = None
        self._total, self._read = total, 0

    def step(self, shape: StepShape) -> None:
        """Advance the bar by the prompt tokens of a finished step."""
        if not self.is_shown:
            return
        self._read += prompt_tokens(shape)
        if self._bar is None:
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn

            columns = TextColumn("prompt tokens"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
            self._bar = _bar(*columns, shown=True)
            self._task = self._bar.add_task("prompt", total=self._total)
            self._bar.start()
        self._bar.update(self._task, completed=min(self._read, self._total))

    def close(self) -> None:
        """Remove the bar permanently."""
        self.is_shown = False
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


@contextmanager
def iterations_bar(total: int) -> Iterator[Callable[[], None]]:
    """Show a bar over iterations. Yields a function to call after each one."""
    with parts_bar("iterations", total) as done:
        yield done


@contextmanager
def parts_bar(what: str, total: int) -> Iterator[Callable[[], None]]:
    """Show a bar over `total` parts, labeled `what`. Yields a function to call after each part."""
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn

    bar = _bar(TextColumn(what), BarColumn(), MofNCompleteColumn(), shown=sys.stderr.isatty())
    task = bar.add_task(what, total=total)
    with bar:
        yield lambda: bar.advance(task)


@contextmanager
def count_bar(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show a bar over `total` things, labeled `what`. Yields a function to call with the number of those just done."""
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn

    columns = TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    bar = _bar(*columns, shown=sys.stderr.isatty())
    task = bar.add_task(what, total=total)
    with bar:
        yield lambda done: bar.advance(task, done)


@contextmanager
def named_parts_bar(total: int) -> Iterator[tuple[Callable[[str], None], Callable[[], None]]]:
    """Show a bar over `total` parts. Yields a function that shows what is done now, and one to call after each part."""
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn

    bar = _bar(BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), shown=sys.stderr.isatty())
    task = bar.add_task("", total=total)
    with bar:
        yield lambda text: bar.update(task, description=text), lambda: bar.advance(task)


class PromptsDone:
    """Updates the bar of `prompts_bar`."""

    def __init__(self, bar: Progress) -> None:
        self._bar, self._task = bar, bar.tasks[0]
        self._new = self._read = 0

    def __call__(self, num_tokens: int) -> None:
        """Record that a prompt is complete, with this number of new tokens."""
        self._new += num_tokens
        self._bar.update(self._task.id, advance=1, tokens_per_s=self._new / (self._task.elapsed or 1.0))

    def step(self, shape: StepShape) -> None:
        """Record the prompt tokens that a step of the engine computed."""
        if read := prompt_tokens(shape):
            self._read += read
            self._bar.update(self._task.id, read=f"{self._read:,} prompt tokens read")


def prompt_tokens(shape: StepShape) -> int:
    """Return the number of prompt tokens that a step computed."""
    return sum(new for new, _, rows in shape if new > 1 or not rows)


@contextmanager
def prompts_bar(total: int, completed: int = 0, *, hidden: bool = False) -> Iterator[PromptsDone]:
    """Show a bar over the prompts of a file. Call the yielded object with the new tokens of each completed prompt, and
    its `step` after each step of the engine, if steps are known, to show how many prompt tokens have been read.

    completed: prompts that an earlier run answered. hidden: show no bar, because answers are printed on the same
    terminal.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn

    speed = TextColumn("{task.fields[tokens_per_s]:.1f} tokens/s")
    read = TextColumn("{task.fields[read]}")
    columns = TextColumn("prompts"), BarColumn(12), MofNCompleteColumn(), speed, read, TimeRemainingColumn()
    bar = _bar(*columns, shown=sys.stderr.isatty() and not hidden)
    bar.add_task("prompts", total=total, completed=completed, tokens_per_s=0.0, read="")
    with bar:
        yield PromptsDone(bar)
