"""`ridgeline lab`: run claims about inference again, and judge them on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ridgeline.cli.flags import options as o
from ridgeline.cli.option import option

if TYPE_CHECKING:
    from ridgeline.lab import Experiment, Record, Setup

LIST, ALL = "list", "all"
PAGE, FACTS = "lab.html", "lab.json"


def lab(
    names: Annotated[
        list[str] | None,
        typer.Argument(help="Experiments by name, claims by number, `all`, or `list`. Default: list."),
    ] = None,
    quick: Annotated[
        bool, option("--quick", help="Measure less, so that `all` takes minutes; times vary more.")
    ] = False,
    model: Annotated[
        str,
        option(
            "--model",
            help="Model that is measured where a claim needs one: a folder, a hub id or pocket. Default: pocket.",
        ),
    ] = "pocket",
    out: Annotated[
        str | None,
        option(
            "--out",
            help="Folder for a JSON file of each experiment and one page. Experiments that it has already are not run "
            "again. Default: none; with `all`: lab.",
        ),
    ] = None,
    seed: Annotated[int, option("--seed", help="Random seed of everything that is drawn. Default: 0.")] = 0,
    threads: o.Threads = None,
    trace: Annotated[
        str | None,
        option("--trace", help="Mooncake trace (JSON lines) for the experiment radix. Default: requests are drawn."),
    ] = None,
    json_output: Annotated[bool, option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Run claims of lectures and papers again: predicted first, then measured here, then judged by fixed limits.

    Each claim holds, differs, or cannot be tried here.
    """
    from ridgeline.cost.calibration import this_machine
    from ridgeline.lab import Setup

    experiments = _chosen(names or [LIST])
    if names is None or names == [LIST]:
        _list(experiments, json_output=json_output)
        return
    machine, note = this_machine()
    folder = Path(out) if out else Path("lab") if ALL in names else None
    setup = Setup(quick, seed, model, threads, machine, trace=trace)
    records = _run(experiments, setup, folder)
    if folder is not None:
        _write(records, note, folder)
    if json_output:
        import json

        print(json.dumps([record.to_json() for record in records], indent=2))
        return
    _show(records, note, folder)


def _chosen(names: Sequence[str]) -> list[Experiment]:
    """Return the experiments of names and numbers, each once. Raises RequestError for unknown ones."""
    from ridgeline.errors import RequestError
    from ridgeline.lab import NAMES, find

    for word in (LIST, ALL):
        if word in names and len(names) > 1:
            raise RequestError(f"`{word}` stands alone: ridgeline lab {word}")
    given = NAMES if names[0] in (LIST, ALL) else names
    return list({found.name: found for found in map(find, given)}.values())


def _run(experiments: Sequence[Experiment], setup: Setup, folder: Path | None) -> tuple[Record, ...]:
    """Run experiments under a bar. Raises RequestError if the folder cannot be written."""
    from dataclasses import replace

    from ridgeline.cli.show.progress import named_parts_bar
    from ridgeline.errors import RequestError
    from ridgeline.lab import run_all
    from ridgeline.lab.figures import check_matplotlib

    if folder is not None:
        check_matplotlib()  # a run of hours should not end without its page
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as e:
            raise RequestError(f"--out {folder} cannot be written: {e.strerror}") from None
    with named_parts_bar(len(experiments)) as (on_part, on_done):
        return run_all(experiments, replace(setup, on_part=on_part), folder, lambda record: on_done())


def _write(records: Sequence[Record], note: str, folder: Path) -> None:
    """Write the page and one JSON file."""
    import json

    from ridgeline.lab.page import page
    from ridgeline.spec.folders import write_whole

    write_whole(folder / PAGE, page(records, note))
    write_whole(folder / FACTS, json.dumps([record.to_json() for record in records], indent=1))


def _show(records: Sequence[Record], note: str, folder: Path | None) -> None:
    """Print what became of the claims, and where the files are."""
    from ridgeline.cli.show.lab_tables import record_tables
    from ridgeline.cli.show.tables import Line, screen, show
    from ridgeline.lab.page import counted

    written = [f"{folder / PAGE} opens in a browser; {folder / FACTS} has all numbers"] if folder else []
    parts = [part for record in records for part in record_tables(record)]
    judgements = [j for record in records for j in record.judgements]
    show(screen(), *parts, *(Line(line, style="dim") for line in (counted(judgements), note, *written)))


def _list(experiments: Sequence[Experiment], *, json_output: bool) -> None:
    from ridgeline.lab.claim import claims

    if json_output:
        import json
        from dataclasses import asdict

        by_claim = {number: e.name for e in experiments for number in e.claims}
        print(json.dumps([asdict(c) | {"experiment": by_claim.get(c.number)} for c in claims().values()], indent=2))
        return
    from ridgeline.cli.show.lab_tables import claims_table
    from ridgeline.cli.show.tables import screen, show

    show(
        screen(), claims_table(experiments), "Run one: ridgeline lab orca, or ridgeline lab 35; all: ridgeline lab all"
    )
