"""`ridgeline calibrate`: this machine's ceilings and overheads, for the planner."""

from __future__ import annotations

from datetime import date
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from pathlib import Path

    from ridgeline.cli.show.tables import Table
    from ridgeline.cost.calibration import Calibration
    from ridgeline.spec.rates import Rates

BUSY = 0.1  # share of all cores that others took, from which on it is said


def calibrate(
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    plot: Annotated[str | None, typer.Option("--plot", help="Draw it: out.png or out.svg.")] = None,
    show: Annotated[bool, typer.Option("--show", help="Show what was measured before; measure nothing.")] = False,
) -> None:
    """Measure how fast this machine reads, copies and multiplies, and what a step costs besides; keep it for `plan`."""
    from ridgeline.cost.calibration import calibration_path, load, save
    from ridgeline.errors import RequestError

    if show:
        found = load()
        if found is None:
            raise RequestError("this machine has not been calibrated: ridgeline calibrate does that")
        path = calibration_path()
    else:
        found = _measure()
        try:
            path = save(found)
        except OSError as e:
            raise RequestError(f"{calibration_path()} cannot be written: {e.strerror}") from None
    if plot:
        from ridgeline.plan.calibration_picture import draw

        draw(found, plot)
    if json_output:
        import json
        from dataclasses import asdict

        print(json.dumps({"path": str(path), **asdict(found)}, allow_nan=False))
    else:
        _print(found, path)


def _measure() -> Calibration:
    from ridgeline.cli.show.progress import parts_bar
    from ridgeline.cost.calibration import Calibration, fingerprint
    from ridgeline.errors import DeviceError
    from ridgeline.measure.calibrate import PARTS, measure_rates
    from ridgeline.measure.quiet import OthersLoad

    machine = fingerprint()
    if machine["kernels"] == "none":
        raise DeviceError("the extension with the kernels is missing, so there is nothing to measure: ridgeline doctor")
    load = OthersLoad()
    with parts_bar("measuring", PARTS) as done:
        found = measure_rates(done)
    return Calibration(machine, found.rates, date.today().isoformat(), found.seconds, load.share())


def _print(found: Calibration, path: Path) -> None:
    from rich.text import Text

    from ridgeline.cli.show.report import say
    from ridgeline.cli.show.tables import screen, show

    m, rates = found.machine, found.rates
    title = Text(m["cpu"], "bold").append(
        f", {m['cores']} cores, {rates.threads} threads, {rates.isa} kernels; {found.date}, {found.seconds:.0f} s",
        "not bold",
    )
    show(screen(), title, *tables(rates), f"kept in {path}")
    if found.others > BUSY:
        say(
            f"other programs took {found.others:.0%} of this machine meanwhile: what was measured is of a busy one; "
            "run it again when it is quiet"
        )


def tables(rates: Rates) -> list[Table]:
    """What was measured: memory, products, attention, the terms of a step."""
    from ridgeline.plan.units import seconds

    memory = _table("memory, GB/s", "", *[_size(s) for s in rates.read[str(rates.threads)].places])
    for name, curves in (("read", rates.read), ("copy", rates.copy)):
        for threads, curve in curves.items():
            values = [f"{curve.at(s) / 1e9:.1f}" if s >= curve.places[0] else "" for s in rates.read[threads].places]
            memory.add_row(f"{name}, {threads} threads" if threads != "1" else f"{name}, 1 thread", *values)
    found = [memory]
    for title, passes in (("products", rates.products), ("attention", rates.attention)):
        rows = next(iter(passes.values())).near.places
        table = _table(f"{title}, GFLOP/s by rows: numbers in caches / in memory", "", *[f"{r:.0f}" for r in rows])
        for kind, p in passes.items():
            table.add_row(kind, *[f"{2e-9 / p.near.at(r):.0f} / {2e-9 / p.far.at(r):.0f}" for r in rows])
        found.append(table)
    terms = _table("what a step takes besides", "of each", "seconds")
    for name, value in sorted(rates.terms.items()):
        if value:
            terms.add_row(name, seconds(value))
    return [*found, terms]


def _size(places: float) -> str:
    return f"{places / 2**20:.0f} MiB"


def _table(title: str, *names: str) -> Table:
    from ridgeline.cli.show.tables import Column, Table

    return Table(title, [Column(name, right=i > 0) for i, name in enumerate(names)])
