"""`ridgeline calibrate`: measure this machine's peak rates and overheads for the planner."""

from __future__ import annotations

from datetime import date
from typing import TYPE_CHECKING, Annotated

from ridgeline.cli.option import option

if TYPE_CHECKING:
    from pathlib import Path

    from ridgeline.cli.show.tables import Table
    from ridgeline.cost.calibration import Calibration
    from ridgeline.spec.rates import Rates


def calibrate(
    json_output: Annotated[bool, option("--json", help="Print one JSON object.")] = False,
    plot: Annotated[
        str | None, option("--plot", help="Write a picture to this file, .png or .svg. Default: none.")
    ] = None,
    out: Annotated[
        str | None,
        option(
            "--out",
            help="Also write the calibration to this file, NAME.json, which --hardware reads on another machine. "
            "Default: none.",
        ),
    ] = None,
    only: Annotated[
        str | None,
        option(
            "--only",
            help="Measure these parts again, and keep the others: memory, a type of matrices (int8) or a type of keys "
            "and values (attention-fp8), separated by commas; takes some seconds. Default: everything.",
        ),
    ] = None,
    show: Annotated[bool, option("--show", help="Print the saved calibration without measuring.")] = False,
    device: Annotated[
        str, option("--device", help="Device to measure: cpu, cuda or cuda:N. Default: auto, a GPU if there is one.")
    ] = "auto",
) -> None:
    """Measure this machine's memory bandwidth, compute rates and step overheads, and save them for `plan`."""
    from ridgeline.errors import RequestError
    from ridgeline.ops import resolve_device
    from ridgeline.ops.table import CPU, REFERENCE

    if out is not None:
        from ridgeline.cli.flags.carry import check_out

        check_out(out)
    name = resolve_device(device)
    if only is not None and (show or name != CPU):
        raise RequestError("--only measures parts of a CPU again; leave out --show, and set --device cpu")
    if name == REFERENCE:
        raise RequestError(f"device {REFERENCE!r} is not calibrated: it defines results, not times; take cpu or cuda")
    if name == CPU:
        _calibrate_cpu(json_output=json_output, plot=plot, show_only=show, only=only, out=out)
    else:
        from ridgeline.cli.calibrate_gpu import calibrate_gpu

        calibrate_gpu(name, json_output=json_output, plot=plot, show_only=show, out=out)


def _calibrate_cpu(
    *, json_output: bool, plot: str | None, show_only: bool, only: str | None, out: str | None
) -> None:  # fmt: skip
    from ridgeline.cli.show.report import say
    from ridgeline.cost.calibration import AGAIN, calibration_path, load, save
    from ridgeline.errors import RequestError

    if show_only:
        found = load()
        if found is None:
            raise RequestError("this machine has not been calibrated; run `ridgeline calibrate` first")
        path = calibration_path()
    else:
        kept, path = load(), calibration_path()
        found = _measure() if only is None else _measure_again(kept, only.split(","))
        if found.may_replace(kept):
            try:
                save(found)
            except OSError as e:
                raise RequestError(f"the calibration cannot be written to {path}: {e.strerror}") from None
        else:
            assert kept is not None
            say(
                f"this measurement is not kept: other programs used {found.others:.0%} of this machine, and "
                f"{kept.others:.0%} during the one of {kept.date}, which stays; {AGAIN}, or delete {path} first"
            )
            found = kept
    if out is not None:
        from ridgeline.cli.flags.carry import carry_to

        carry_to(found, out)
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
    from ridgeline.system import threads_per_core

    machine = fingerprint()
    if machine["kernels"] == "none":
        raise DeviceError("there is nothing to measure: the C++ kernels are missing; `ridgeline doctor` says why")
    load = OthersLoad()
    with parts_bar("measuring", PARTS) as done:
        found = measure_rates(done)
    return Calibration(
        machine, found.rates, date.today().isoformat(), found.seconds, load.share(), found.speed_change,
        threads_per_core(),
    )  # fmt: skip


def _measure_again(kept: Calibration | None, parts: list[str]) -> Calibration:
    """Return a calibration with some parts measured again; others are as they were, and so is what disturbed them."""
    from dataclasses import replace

    from ridgeline.cli.show.progress import parts_bar
    from ridgeline.errors import RequestError
    from ridgeline.measure.calibrate import PART_NAMES, measure_parts
    from ridgeline.measure.quiet import OthersLoad

    if wrong := [part for part in parts if part not in PART_NAMES]:
        raise RequestError(f"--only {wrong[0]!r:.60}: take {', '.join(PART_NAMES)}")
    if kept is None:
        raise RequestError("this machine has not been calibrated; run `ridgeline calibrate` without --only first")
    load = OthersLoad()
    with parts_bar("measuring", len(parts)) as done:
        found = measure_parts(kept.rates, parts, done)
    change = max(kept.speed_change, found.speed_change, key=abs)
    return replace(
        kept, rates=found.rates, date=date.today().isoformat(), seconds=found.seconds,
        others=max(kept.others, load.share()), speed_change=change,
    )  # fmt: skip


def _print(found: Calibration, path: Path) -> None:
    from rich.text import Text

    from ridgeline.cli.show.report import say
    from ridgeline.cli.show.tables import screen, show

    m, rates = found.machine, found.rates
    title = Text(m["cpu"], "bold").append(
        f", {m['cores']} cores, {rates.threads} threads, {rates.isa} kernels; {found.date}, {found.seconds:.0f} s",
        "not bold",
    )
    show(screen(), title, *tables(rates), f"saved in {path}")
    if found.is_busy:
        say(
            f"other programs used {found.others:.0%} of this machine during the measurement, so the rates are too low; "
            "run it again when the machine is idle"
        )
    if found.is_unsteady:
        say(
            f"the processor's speed changed by {abs(found.speed_change):.0%} during the measurement: its clock "
            "changed, or another machine on the same host took part of this one; run it again"
        )


def tables(rates: Rates) -> list[Table]:
    """Return the tables of a calibration: memory, matrix products, attention, overheads of a step."""
    from ridgeline.plan.units import seconds

    memory = _table("memory, GB/s", "", *[_size(s) for s in rates.read[str(rates.threads)].points])
    for name, curves in (("read", rates.read), ("copy", rates.copy)):
        for threads, curve in curves.items():
            values = [f"{curve.at(s) / 1e9:.1f}" if s >= curve.points[0] else "" for s in rates.read[threads].points]
            memory.add_row(f"{name}, {threads} threads" if threads != "1" else f"{name}, 1 thread", *values)
    found = [memory]
    for title, passes in (("products", rates.products), ("attention", rates.attention)):
        rows = next(iter(passes.values())).near.points
        table = _table(f"{title}, GFLOP/s by rows: data in caches / in memory", "", *[f"{r:.0f}" for r in rows])
        for kind, p in passes.items():
            table.add_row(kind, *[f"{2e-9 / p.near.at(r):.0f} / {2e-9 / p.far.at(r):.0f}" for r in rows])
        found.append(table)
    terms = _table("overheads of a step", "for each", "seconds")
    for name, value in sorted(rates.terms.items()):
        if value:
            terms.add_row(name, seconds(value))
    return [*found, terms]


def _size(points: float) -> str:
    return f"{points / 2**20:.0f} MiB"


def _table(title: str, *names: str) -> Table:
    from ridgeline.cli.show.tables import Column, Table

    return Table(title, [Column(name, right=i > 0) for i, name in enumerate(names)])
