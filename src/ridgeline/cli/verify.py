"""`ridgeline verify`: is every token the same, however a request is served?"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from ridgeline.cli.flags import options as o

if TYPE_CHECKING:
    from ridgeline.cli.show.tables import Table
    from ridgeline.verify import CaseResult, Report

STYLES = {
    "equal": "green", "near tie": "yellow", "not exercised": "yellow", "DIFFERENT": "bold red", "error": "bold red",
    "not run": "dim",
}  # fmt: skip
MAX_SHOWN = 5  # differences of one case
SMALL = 10**7  # parameters: with fewer, a step is so short that threads only wait for each other


def verify(
    model: Annotated[str, typer.Argument(help="A folder, or a Hugging Face hub id.")],
    quick: Annotated[
        bool, typer.Option("--quick", help="Few values of each axis, short answers: for large models.")
    ] = False,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    seed: Annotated[int, typer.Option(help="Of prompts, noise, arrivals, combinations, dummy weights.")] = 0,
    device: o.Device = "auto",
    dtype: o.DType = "auto",
    weights: o.WeightFormat = "auto",
    max_model_len: o.MaxModelLen = None,
    load_format: o.LoadFormat = "auto",
    revision: o.Revision = None,
    kv_cache_dtype: o.KVCacheDType = "auto",
) -> None:
    """Check that answers do not depend on how they are served: chunks, prefix hits, company, preemption, forks, pages.

    Every token, greedy and sampled, must be that of naive sampling alone. Exit status 1 if one is not.
    """
    from ridgeline.cli.flags.loading import load

    _spare_threads(model, revision)
    options = {
        "cache": "off", "device": device, "dtype": dtype, "weights": weights, "max_model_len": max_model_len,
        "load_format": load_format, "revision": revision, "seed": seed, "kv_cache_dtype": kv_cache_dtype,
    }  # fmt: skip
    llm = load(model, options)
    from ridgeline.verify import verify

    with _cases_bar() as on_case:
        report = verify(llm.loaded, llm.tokenizer, quick=quick, seed=seed, on_case=on_case)
    if json_output:
        import json

        print(json.dumps({"model": model, **report.to_json()}, indent=2, allow_nan=False))
    else:
        print_report(report)
    if not report.equal:
        raise typer.Exit(1)


def _spare_threads(model: str, revision: str | None) -> None:
    """One thread for a small model, unless OMP_NUM_THREADS says otherwise. Call it before numpy or torch is imported.

    Where others use the machine too, threads cost it ten times as long and more: its steps are shorter than the time
    for which the system lets a thread wait for its core.
    """
    from ridgeline.archs import spec_from_config
    from ridgeline.load.hub import CONFIG_FILES, find_model
    from ridgeline.spec.folders import read_json

    config = read_json(find_model(model, revision=revision, files=CONFIG_FILES) / "config.json")
    if spec_from_config(config).num_params() < SMALL:
        os.environ.setdefault("OMP_NUM_THREADS", "1")


@contextmanager
def _cases_bar() -> Iterator[Callable[[CaseResult, int], None]]:
    """A bar over the cases, with the one that was last done; call what it gives after each."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    from ridgeline.cli.show.progress import error_console

    columns = TextColumn("cases"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}")
    # Redirected, what is printed to stdout meanwhile would go to the console of the bar.
    shown = sys.stderr.isatty()
    bar = Progress(
        *columns, console=error_console(), transient=True, disable=not shown, redirect_stdout=False
    )  # fmt: skip
    task = bar.add_task("", total=None)

    def done(result: CaseResult, total: int) -> None:
        bar.update(task, advance=1, total=total, description=f"{result.case.axis} {result.case.value}")

    with bar:
        yield done


def print_report(report: Report) -> None:
    """Print the matrix as a table, every difference, and the sum of it all."""
    from ridgeline.cli.show.tables import screen, show

    show(screen(), matrix_table(report), *_remarks(report), _sum(report))


def matrix_table(report: Report) -> Table:
    """A row for each case."""
    from rich.text import Text

    from ridgeline.cli.show.tables import Column, Table

    columns = (
        Column("axis", right=False), Column("value", right=False, wraps=True), Column("greedy"), Column("sampled"),
        Column("what was seen", right=False, wraps=True), Column("s", drop=1),
    )  # fmt: skip
    table, axis = Table("", columns), ""
    for r in report.results:
        style = STYLES[r.verdict]
        seen = filter(None, [r.verdict if r.verdict != "equal" else "", r.observed.describe(r.case)])
        table.add_row(
            r.case.axis if r.case.axis != axis else "",
            r.case.value,
            *(Text(f"{s.equal}/{s.total}", style) if s.total else "-" for s in (r.greedy, r.sampled)),
            r.case.impossible or ": ".join(seen),
            f"{r.seconds:.1f}",
        )
        axis = r.case.axis
    return table


def _remarks(report: Report) -> Iterator[str]:
    """A line for everything that is not as it should be."""
    for r in report.results:
        name = f"{r.case.axis} {r.case.value}"
        if r.error:
            yield f"{name}: {r.error}"
        for reason in r.missing:
            yield f"{name}: not exercised: {reason}"
        for difference in r.differences[:MAX_SHOWN]:
            yield f"{name}: {difference.describe()}"
        if len(r.differences) > MAX_SHOWN:
            yield f"{name}: and {len(r.differences) - MAX_SHOWN} more"


def _sum(report: Report) -> str:
    """One line: how many cases came out how, how many tokens were compared."""
    greedy, sampled = report.greedy, report.sampled
    cases = ", ".join(f"{count} {verdict}" for verdict, count in report.verdicts().items())
    lead = f"; the smallest lead of a greedy token is {report.smallest_lead:.1e}" if report.smallest_lead else ""
    return (
        f"cases: {cases}; tokens equal: {greedy.equal:,} of {greedy.total:,} greedy, {sampled.equal:,} of "
        f"{sampled.total:,} sampled{lead}; {report.seconds:.0f} s"
    )
