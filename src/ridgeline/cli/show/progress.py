"""Progress bars, on stderr, and only where somebody sees them; nothing is imported for one that is not shown."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, ProgressColumn

    from ridgeline.sched.stats import StepShape

BIG = 1 << 28  # bytes: less than this loads before a bar could be read


def error_console() -> Console:
    """The console of stderr."""
    from ridgeline.cli.show.tables import screen

    return screen(stderr=True)


def _bar(*columns: ProgressColumn, shown: bool) -> Progress:
    from rich.progress import Progress

    # Redirected, what is printed to stdout meanwhile would go to the console of the bar, which is stderr.
    return Progress(*columns, console=error_console(), transient=True, disable=not shown, redirect_stdout=False)


@contextmanager
def loading_bar() -> Iterator[Callable[[int], Callable[[int], None]]]:
    """For `LLM(progress_bar=...)`: a bar in bytes for models that take a while."""
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
    """A bar over the requests of a simulation; call what it gives for each. It moves a few hundred times in all, so
    that it costs nothing.
    """
    if not sys.stderr.isatty():
        yield lambda: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn

    bar = _bar(TextColumn("requests"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), shown=True)
    task, stride, count = bar.add_task("requests", total=total), max(1, total // 300), 0

    def over() -> None:
        nonlocal count
        count += 1
        if count % stride == 0:
            bar.update(task, completed=count)

    with bar:
        yield over


class PrefillBar:
    """A bar over the tokens of prompts that take several steps to read; `close` it before anything else is printed.

    total: tokens of all prompts. chunk: the most tokens of one step; None where that is not known. Nothing is shown
    for prompts of one step, nor without a terminal.
    """

    def __init__(self, total: int, chunk: int | None) -> None:
        self.is_shown = sys.stderr.isatty() and chunk is not None and total > chunk
        self._bar: Progress | None = None
        self._total, self._read = total, 0

    def step(self, shape: StepShape) -> None:
        """A step is over: what it computed."""
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
        """Take the bar away, for good."""
        self.is_shown = False
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


@contextmanager
def iterations_bar(total: int) -> Iterator[Callable[[], None]]:
    """A bar over things that take a while each; call what it gives once for each."""
    with parts_bar("iterations", total) as done:
        yield done


@contextmanager
def parts_bar(what: str, total: int) -> Iterator[Callable[[], None]]:
    """The same, by another name."""
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn

    bar = _bar(TextColumn(what), BarColumn(), MofNCompleteColumn(), shown=sys.stderr.isatty())
    task = bar.add_task(what, total=total)
    with bar:
        yield lambda: bar.advance(task)


class PromptsDone:
    """The bar that `prompts_bar` yields."""

    def __init__(self, bar: Progress) -> None:
        self._bar, self._task = bar, bar.tasks[0]
        self._new = self._read = 0

    def __call__(self, num_tokens: int) -> None:
        """A prompt is complete, with so many new tokens."""
        self._new += num_tokens
        self._bar.update(self._task.id, advance=1, tokens_per_s=self._new / (self._task.elapsed or 1.0))

    def step(self, shape: StepShape) -> None:
        """A step of the engine is over: what it computed."""
        if read := prompt_tokens(shape):
            self._read += read
            self._bar.update(self._task.id, read=f"{self._read:,} prompt tokens read")


def prompt_tokens(shape: StepShape) -> int:
    """The tokens of prompts among those that a step computed."""
    return sum(new for new, _, rows in shape if new > 1 or not rows)


@contextmanager
def prompts_bar(total: int, completed: int = 0, *, hidden: bool = False) -> Iterator[PromptsDone]:
    """A bar over the prompts of a file; call what it gives with the new tokens of each prompt that is complete, and its
    `step` with each step of the engine, where those are known: the bar says how many tokens of prompts are read.

    completed: prompts of an earlier run. hidden: where answers appear on the same terminal, they are the progress.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn

    speed = TextColumn("{task.fields[tokens_per_s]:.1f} tokens/s")
    read = TextColumn("{task.fields[read]}")
    columns = TextColumn("prompts"), BarColumn(12), MofNCompleteColumn(), speed, read, TimeRemainingColumn()
    bar = _bar(*columns, shown=sys.stderr.isatty() and not hidden)
    bar.add_task("prompts", total=total, completed=completed, tokens_per_s=0.0, read="")
    with bar:
        yield PromptsDone(bar)
