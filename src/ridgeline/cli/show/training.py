"""Show the progress of training: lines, and bars on a terminal."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

    from ridgeline.train.loop import Progress
    from ridgeline.train.ranks import Ranks
    from ridgeline.train.run import OnStep, Run


class Bars:
    """Shows lines and progress bars on stderr; without a terminal, a line for every evaluation."""

    def __init__(self, bar: Bar, speaks: bool) -> None:
        self._bar, self._speaks = bar, speaks

    def say(self, line: str) -> None:
        """Print a line."""
        from ridgeline.cli.show.tables import show

        if self._speaks:
            show(self._bar.console, line)

    def run(self, name: str, run: Run) -> OnStep:
        """Announce a run. The returned function is called after every step."""
        import statistics

        options = run.options
        tokens = options.steps * options.batch_tokens
        self.say(
            f"{name}: {run.spec.num_params() / 1e6:,.2f} M parameters, {options.steps:,} updates of "
            f"{options.batch_tokens:,} tokens, {tokens * run.flops_per_token:.2e} FLOPs; {run.machine}: "
            f"{run.peak_flops_per_s / 1e9:,.0f} GFLOP/s peak in {options.precision}"
        )
        task = self._bar.add_task(name, total=options.steps, facts="")
        pace: list[float] = []

        def on_step(p: Progress) -> None:
            pace.append(p.tokens_per_s)
            recent = statistics.median(pace[-20:])
            share = recent * run.flops_per_token / run.peak_flops_per_s
            facts = f"loss {p.loss:.3f}, {recent:,.0f} tokens/s, {share:.0%} of peak"
            self._bar.update(task, completed=p.step, facts=facts)
            if p.held_out is not None:
                left = (options.steps - p.step) * options.batch_tokens / recent
                self.say(f"{name} {p.step:,}/{options.steps:,}: {facts}{_held_out(p, run)}; {left / 60:,.1f} min left")

        return on_step

    def tokens(self, name: str, total: int) -> Callable[..., None]:
        """Announce other long work. The returned function is called with numbers of tokens."""
        task = self._bar.add_task(name, total=total, facts="")

        def done(tokens: int, facts: str = "") -> None:
            self._bar.update(task, advance=tokens, facts=facts)

        return done


def _held_out(p: Progress, run: Run) -> str:
    text = f"; held out {p.held_out:.3f}"
    if p.held_out is not None and run.bytes_per_token:
        text += f", {p.held_out / math.log(2) / run.bytes_per_token:.3f} bits per byte"
    return text


@contextmanager
def training_bars(ranks: Ranks) -> Iterator[Bars]:
    """Yield the progress of a run, which only the first rank shows."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from ridgeline.cli.show.progress import error_console

    columns = (
        TextColumn("{task.description}"), BarColumn(12), MofNCompleteColumn(), TextColumn("{task.fields[facts]}"),
        TimeRemainingColumn(),
    )  # fmt: skip
    # Without redirect_stdout=False, rich would print stdout's text on the bar's console, which is stderr.
    bar = Progress(
        *columns, console=error_console(), disable=not (ranks.is_first and sys.stderr.isatty()), redirect_stdout=False
    )
    with bar:
        yield Bars(bar, ranks.is_first)
