"""`ridgeline verify`: check that every token stays the same however a request is served."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from json import dumps
from typing import TYPE_CHECKING, Annotated

import typer

from ridgeline.cli.flags import options as o
from ridgeline.cli.option import option

if TYPE_CHECKING:
    from ridgeline.cli.show.tables import Table
    from ridgeline.llm import LLM
    from ridgeline.runtime.load import LoadedModel
    from ridgeline.verify import CaseResult, Report

STYLES = {
    "equal": "green", "near tie": "yellow", "not exercised": "yellow", "DIFFERENT": "bold red", "error": "bold red",
    "not run": "dim",
}  # fmt: skip
Parts = Annotated[
    str | None,
    option(
        "--tensor-parallel-size",
        "-tp",
        metavar="N,...",
        help="Numbers of parts, such as 2,4. The model is cut into so many parts, as for so many ranks, which are "
        "computed in this process, and must give the tokens of the whole model. Default: the model is whole.",
    ),
]
MAX_DIGITS = 4  # of a number of parts
MAX_SHOWN = 5  # differences shown per case
SMALL = 10**7  # parameters; below this number a step is so short that threads mostly wait for each other


def verify(
    model: Annotated[str, typer.Argument(help="A folder or a Hugging Face hub id.")],
    quick: Annotated[
        bool, option("--quick", help="Test fewer cases with shorter answers. Use it for large models.")
    ] = False,
    json_output: Annotated[bool, option("--json", help="Print one JSON object.")] = False,
    seed: Annotated[
        int,
        option(
            "--seed", help="Random seed for prompts, sampling, arrivals, combinations and dummy weights. Default: 0."
        ),
    ] = 0,
    device: o.Device = "auto",
    dtype: o.DType = "auto",
    weights: o.WeightFormat = "auto",
    activations: o.Activations = None,
    max_model_len: o.MaxModelLen = None,
    load_format: o.LoadFormat = "auto",
    diffusion_block: o.DiffusionBlock = None,
    block_cache: o.BlockCache = None,
    revision: o.Revision = None,
    kv_cache_dtype: o.KVCacheDType = "auto",
    attention: o.Attention = "exact",
    ops: o.Ops = None,
    tensor_parallel_size: Parts = None,
) -> None:
    """Check that answers do not depend on how they are served: chunks, prefix hits, batches, preemption, forks, pages.

    Every token, greedy or sampled, must equal that of naive sampling: one sequence alone, without a cache. The exit
    status is 1 if any differs.
    """
    from ridgeline.cli.flags.loading import load

    sizes = _sizes(tensor_parallel_size)
    _spare_threads(model, revision)
    options = {
        "cache": "off", "device": device, "dtype": dtype, "weights": weights, "activations": activations,
        "max_model_len": max_model_len, "load_format": load_format, "revision": revision, "seed": seed,
        "diffusion_block": diffusion_block, "block_cache": block_cache, "kv_cache_dtype": kv_cache_dtype,
        "attention": attention, "ops": o.parse_ops(ops),
    }  # fmt: skip
    llm = load(model, options)
    from ridgeline.ops.arithmetic import arithmetic_lines
    from ridgeline.verify import verify as run

    arithmetic = arithmetic_lines(llm.loaded.model.formats.formats, table=llm.loaded.table)
    reports = {}
    for size in sizes:
        with _cases_bar() as on_case, _parts(model, llm, size) as served:
            reports[size] = run(
                served, llm.tokenizer, quick=quick, seed=seed, on_case=on_case, whole=llm.loaded
            )  # fmt: skip
        if not json_output:
            print_report(reports[size], arithmetic, f"{size} parts" if size > 1 else "")
    if json_output:
        found = {str(size): report.to_json() for size, report in reports.items()}
        own = found["1"] if tensor_parallel_size is None else {"tensor_parallel_size": found}
        print(dumps({"model": model, "arithmetic": arithmetic, **own}, indent=2, allow_nan=False))
    if not all(report.equal for report in reports.values()):
        raise typer.Exit(1)


def _sizes(given: str | None) -> tuple[int, ...]:
    """Return the numbers of parts, ascending. Raises RequestError for a value that is no list of numbers."""
    from ridgeline.errors import RequestError

    words = (given or "1").split(",")
    if not all(word.isascii() and word.isdigit() and len(word) <= MAX_DIGITS and int(word) for word in words):
        raise RequestError(
            f"tensor_parallel_size (--tensor-parallel-size) {given!r}: give numbers from 1 on, as in 2,4"
        )
    return tuple(sorted({int(word) for word in words}))


def _parts(model: str, llm: LLM, size: int) -> AbstractContextManager[LoadedModel]:
    """Return the model as it is verified: whole, or the first of its parts, which the others follow."""
    from dataclasses import replace

    from ridgeline.runtime.slices import open_slices
    from ridgeline.verify.poison import poisoned

    loaded = llm.loaded
    if size == 1:
        return nullcontext(loaded)
    return open_slices(model, llm.options, size, lambda part: poisoned(replace(part, storage=loaded.storage)))


def _spare_threads(model: str, revision: str | None) -> None:
    """Use one thread for a small model unless OMP_NUM_THREADS is set. Call this before numpy or torch is imported.

    A step of a small model is shorter than the time for which the system may delay a thread. On a busy machine, several
    threads therefore make it ten times slower or worse.
    """
    from ridgeline.archs import spec_from_config
    from ridgeline.load.gguf.paths import is_gguf, parts_of
    from ridgeline.load.hub import CONFIG_FILES, find_model
    from ridgeline.spec.folders import read_json

    folder = find_model(model, revision=revision, files=CONFIG_FILES)
    if is_gguf(folder):  # reading its description would import numpy
        size = sum(part.stat().st_size for part in parts_of(folder))
    else:
        size = spec_from_config(read_json(folder / "config.json")).num_params()
    if size < SMALL:
        os.environ.setdefault("OMP_NUM_THREADS", "1")


@contextmanager
def _cases_bar() -> Iterator[Callable[[CaseResult, int], None]]:
    """Show a progress bar over the cases, with the latest one. Yields a function to call after each case."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    from ridgeline.cli.show.progress import error_console

    columns = TextColumn("cases"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}")
    # Without redirect_stdout=False, rich would print stdout's text on the bar's console, which is stderr.
    shown = sys.stderr.isatty()
    bar = Progress(
        *columns, console=error_console(), transient=True, disable=not shown, redirect_stdout=False
    )  # fmt: skip
    task = bar.add_task("", total=None)

    def done(result: CaseResult, total: int) -> None:
        bar.update(task, advance=1, total=total, description=f"{result.case.axis} {result.case.value}")

    with bar:
        yield done


def print_report(report: Report, arithmetic: Sequence[str] = (), title: str = "") -> None:
    """Print the matrix of cases as a table, every difference, the arithmetic of products, and a summary."""
    from ridgeline.cli.show.tables import screen, show

    show(screen(), *report_parts(report, arithmetic, title))


def report_parts(report: Report, arithmetic: Sequence[str] = (), title: str = "") -> list[Table | str]:
    """Return the matrix of cases as a table, and a line for each difference, for the arithmetic and for the sum."""
    return [matrix_table(report, title), *_remarks(report), *arithmetic, _sum(report)]


def matrix_table(report: Report, title: str = "") -> Table:
    """Return a table with a row for each case."""
    from rich.text import Text

    from ridgeline.cli.show.tables import Column, Table

    columns = (
        Column("axis", right=False), Column("value", right=False, wraps=True), Column("greedy"), Column("sampled"),
        Column("observed", right=False, wraps=True), Column("s", drop=1),
    )  # fmt: skip
    table, axis = Table(title, columns), ""
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
    """Yield a line for every error, difference and case that was not exercised."""
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
    """Summarize in one line: cases by verdict, and tokens compared."""
    greedy, sampled = report.greedy, report.sampled
    cases = ", ".join(f"{count} {verdict}" for verdict, count in report.verdicts().items())
    lead = f"; the smallest lead of a greedy token is {report.smallest_lead:.1e}" if report.smallest_lead else ""
    return (
        f"cases: {cases}; tokens equal: {greedy.equal:,} of {greedy.total:,} greedy, {sampled.equal:,} of "
        f"{sampled.total:,} sampled{lead}; {report.seconds:.0f} s"
    )
