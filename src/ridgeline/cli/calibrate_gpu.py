"""`ridgeline calibrate --device cuda`: measure the ceilings of a GPU, and show them."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ridgeline.cli.show.tables import Table
    from ridgeline.cost.gpu_calibration import GpuCalibration


def calibrate_gpu(device: str, *, json_output: bool, plot: str | None, show_only: bool, out: str | None) -> None:
    """Measure a GPU and save the result, or show the last one.

    Raises RequestError if there is nothing to show, if the file cannot be written, and for a picture.
    """
    from ridgeline.cost.gpu_calibration import GPU_REMEDY, gpu_path, load_gpu, save_gpu
    from ridgeline.errors import RequestError
    from ridgeline.ops.devices import gpu_facts

    if plot is not None:
        raise RequestError(f"--plot {plot} draws the rates of a CPU; leave it out, or take --device cpu")
    facts = gpu_facts(device)
    path = gpu_path(facts)
    if show_only:
        found = load_gpu(facts)
        if found is None:
            raise RequestError(f"{facts['gpu']} has not been calibrated; {GPU_REMEDY}")
    else:
        found = _measure(device, facts)
        try:
            save_gpu(found)
        except OSError as e:
            raise RequestError(f"the calibration cannot be written to {path}: {e.strerror}") from None
    if out is not None:
        from ridgeline.cli.flags.carry import carry_to

        carry_to(found, out)
    if json_output:
        import json
        from dataclasses import asdict

        print(json.dumps({"path": str(path), **asdict(found)}, allow_nan=False))
        return
    from ridgeline.cli.show.tables import screen, show

    show(screen(), f"{found.machine['gpu']}; {found.date}, {found.seconds:.0f} s", *tables(found), f"saved in {path}")


def _measure(device: str, facts: dict[str, str]) -> GpuCalibration:
    from ridgeline.cli.show.progress import parts_bar
    from ridgeline.cost.gpu_calibration import GpuCalibration
    from ridgeline.measure.gpu import PARTS, measure_gpu
    from ridgeline.ops.devices import gpu_probe

    with parts_bar("measuring", PARTS) as done:
        rates, missing, seconds = measure_gpu(gpu_probe(device), done)
    return GpuCalibration(facts, rates, date.today().isoformat(), seconds, missing)


def tables(found: GpuCalibration) -> list[Table]:
    """Return the tables of a GPU's calibration: memory, products, and the time of kernels."""
    from ridgeline.plan.units import seconds

    rates = found.rates
    return [
        _table("memory", ("", "GB/s"), [
            ("copy on the GPU, read and written", f"{rates.copy_bytes_per_s / 1e9:,.0f}"),
            ("to the GPU", f"{rates.to_device_bytes_per_s / 1e9:,.1f}"),
            ("from the GPU", f"{rates.from_device_bytes_per_s / 1e9:,.1f}"),
        ]),
        _table("products", ("", "TFLOP/s"), [
            *((kind, f"{flops / 1e12:,.0f}") for kind, flops in rates.flops_per_s.items()),
            *((kind, f"none: {why}") for kind, why in found.missing.items()),
        ]),
        _table("kernels", ("", "seconds"), [
            ("a small kernel that the host starts", seconds(rates.launch_s)),
            ("a small kernel of a CUDA graph", seconds(rates.node_s)),
            ("a graph, besides its kernels", seconds(rates.graph_s)),
        ]),
    ]  # fmt: skip


def _table(title: str, names: Sequence[str], rows: Sequence[tuple[str, str]]) -> Table:
    from ridgeline.cli.show.tables import Column, Table

    table = Table(title, [Column(name, right=i > 0) for i, name in enumerate(names)])
    for row in rows:
        table.add_row(*row)
    return table
