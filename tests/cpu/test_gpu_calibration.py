"""The calibration of a GPU, from a stub with recorded timings: what is kept of them, and who uses it."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from ridgeline.cli.main import main
from ridgeline.cost.calibration import find_machine
from ridgeline.cost.gpu_calibration import (
    GpuCalibration,
    GpuRates,
    calibrated_gpu,
    gpu_path,
    load_gpu,
    machine_of_gpu,
    save_gpu,
)
from ridgeline.cost.precision import Precision, products_type
from ridgeline.errors import DeviceError
from ridgeline.measure.gpu import PARTS, measure_gpu
from ridgeline.measure.predict import calibrated_machine
from ridgeline.ops.devices import Device, first_gpu
from ridgeline.ops.torchlib.probe import MULTIPLY, GpuProbe
from ridgeline.plan.planner import Deployment, Planner
from ridgeline.serve.engine.machine import StepLedger
from ridgeline.spec import Attention, GatedMLP, Layer, ModelSpec, RMSNorm, Rope

FACTS = {
    "gpu": "NVIDIA Stub", "capability": "9.0", "memory": str(80 << 30), "processors": "132", "cuda": "13.0",
    "torch": "2.13", "triton": "3.7.1",
}  # fmt: skip
NORM = RMSNorm()
TINY = ModelSpec("tiny", 64, 32, 2048, (Layer(Attention(2, 1, 16, 0.25, Rope(16)), GatedMLP(48), NORM),) * 3, NORM)


class Recorded:
    """A GPU that copies 4 TB/s, multiplies 500 TFLOP/s in bfloat16 at best, and starts a kernel in 3 us."""

    rates: ClassVar = {"bfloat16": {4096: 400e12, 8192: 500e12}, "float16": {4096: 600e12, 8192: 450e12},
             "int8": {4096: 900e12, 8192: 1000e12}}  # fmt: skip

    def memory_bytes(self) -> int:
        return 80 << 30

    def copy_s(self, num_bytes: int) -> float:
        return 2 * num_bytes / 4e12 * (1.1 if num_bytes < 1 << 30 else 1.0)

    def product_s(self, kind: str, size: int) -> float | str:
        return 2 * size**3 / self.rates[kind][size] if kind in self.rates else f"no {kind} on this GPU"

    def launch_s(self) -> float:
        return 3e-6

    def graph_s(self, nodes: int) -> float:
        return 8e-6 + nodes * 1.5e-6

    def host_copy_s(self, num_bytes: int, *, to_device: bool) -> float:
        return num_bytes / (50e9 if to_device else 40e9)


RATES = GpuRates(
    80 << 30, 4e12, {"bfloat16": 500e12, "float16": 600e12, "int8": 1000e12}, 3e-6, 1.5e-6, 8e-6, 50e9, 40e9
)
KEPT = GpuCalibration(FACTS, RATES, "2026-11-24", 21.0, {"fp8": "no fp8 on this GPU"})


@pytest.fixture(autouse=True)
def stub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Give this machine one GPU, and an empty folder of calibrations."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    devices = import_module("ridgeline.ops.devices")  # the package exports a function of this name
    monkeypatch.setattr("ridgeline.system.gpu_driver", lambda: True)
    monkeypatch.setattr(devices, "_gpus", lambda: (Device("cuda:0", "NVIDIA Stub"),))
    for module in ("ridgeline.ops.devices", "ridgeline.measure.predict"):
        monkeypatch.setattr(import_module(module), "gpu_facts", lambda device: dict(FACTS))
    monkeypatch.setattr(devices, "gpu_probe", lambda device: Recorded())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    monkeypatch.setattr(sys, "argv", ["ridgeline", *words])
    try:
        main()
    except SystemExit as e:
        assert not e.code, e.code


def test_ceilings_are_those_of_the_timings() -> None:
    parts: list[int] = []
    rates, missing, seconds = measure_gpu(Recorded(), lambda: parts.append(1))
    for name in GpuRates.__slots__:
        assert getattr(rates, name) == pytest.approx(getattr(RATES, name)), name
    assert missing == {"fp8": "no fp8 on this GPU"} and seconds >= 0 and len(parts) == PARTS


def test_a_gpu_without_bfloat16_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Recorded, "rates", {"float16": Recorded.rates["float16"]})
    with pytest.raises(DeviceError, match="no products of bfloat16, which all kernels need: no bfloat16 on this GPU"):
        measure_gpu(Recorded())


def test_noise_gives_no_negative_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Recorded, "graph_s", lambda self, nodes: 9e-6 - nodes * 1e-9)
    rates, _, _ = measure_gpu(Recorded())
    assert rates.node_s > 0 and rates.graph_s > 0


def test_a_calibration_is_stored_for_one_gpu() -> None:
    assert load_gpu(FACTS) is None
    machine, note = calibrated_gpu(FACTS)
    assert machine is None and "ridgeline calibrate --device cuda" in note
    path = save_gpu(KEPT)
    assert load_gpu(FACTS) == KEPT
    assert load_gpu({**FACTS, "torch": "2.14"}) is None
    value = json.loads(path.read_text())
    for change in ({"format": 99}, {"rates": 5}, {"rates": {**value["rates"], "copy_bytes_per_s": 0}}, {"x": 1}):
        path.write_text(json.dumps({**value, **change}))
        assert load_gpu(FACTS) is None, change


def test_the_time_of_a_step_has_its_kernels_and_its_graph() -> None:
    machine = machine_of_gpu(KEPT)
    assert machine.peak("float32") == 250e12 and machine.peak("bfloat16") == 500e12 and machine.is_measured
    precision = Precision("bfloat16", "bfloat16", "float32")
    with_kernels, roof = (
        Planner(Deployment(TINY, m, precision)).decode(4, 100) for m in (machine, machine.roof())
    )  # fmt: skip
    kernels = sum(t.operation.layers for t in with_kernels.operations)
    assert with_kernels.seconds == pytest.approx(roof.seconds + 8e-6 + kernels * 1.5e-6)
    assert roof.bytes / 4e12 <= roof.seconds * (1 + 1e-9) and not machine.roof().is_measured


def test_products_are_counted_as_our_kernels_compute_them() -> None:
    machine = machine_of_gpu(replace(KEPT, rates=replace(RATES, flops_per_s={**RATES.flops_per_s, "fp8": 9e14})))
    types = {weights: products_type(machine, weights, "float32") for weights in ("int8", "fp8", "bfloat16")}
    assert types == {"int8": "int8", "fp8": "float32", "bfloat16": "float32"}


def test_calibrate_measures_the_gpu_and_others_use_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(monkeypatch, "calibrate", "--json")
    found = json.loads(capsys.readouterr().out)
    assert found["path"] == str(gpu_path(FACTS)) and found["rates"]["copy_bytes_per_s"] == pytest.approx(4e12)
    run(monkeypatch, "calibrate", "--device", "cuda", "--show")
    shown = capsys.readouterr().out
    for text in ("NVIDIA Stub", "4,000", "500", "none: no fp8 on this GPU", "1.5 us"):
        assert text in shown.replace("µ", "u"), shown

    run(monkeypatch, "plan", "llama-3-8b", "--json")
    planned = json.loads(capsys.readouterr().out)
    assert planned["deployment"]["hardware"]["name"] == "NVIDIA Stub"
    run(monkeypatch, "doctor", "--device", "cuda", "--json")
    device = json.loads(capsys.readouterr().out)["devices"]["cuda:0"]
    assert "80 GiB, compute capability 9.0; calibrated on" in device and "copies 4.00 TB/s" in device
    run(monkeypatch, "explain", "pocket", "--json")
    assert "NVIDIA Stub, calibrated on" in json.loads(capsys.readouterr().out)["machine"]
    machine, note = calibrated_machine(None, "cuda:0")
    assert machine is not None and "nobody has compared" in note
    ledger = StepLedger(Deployment(TINY, machine, Precision("bfloat16", "bfloat16", "float32")))
    cost = ledger.cost(((1, 100, 1),))
    assert ledger.predicts and cost.predicted_s > cost.roof_s > 0


def test_a_gpu_that_is_not_calibrated_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    machine, note = find_machine("local", first_gpu)
    assert machine.kind == "cpu" and "because NVIDIA Stub is not calibrated" in note
    assert calibrated_machine(None, "cuda:0")[0] is None
    run(monkeypatch, "doctor", "--device", "cuda", "--json")
    assert "not calibrated: run `ridgeline calibrate" in json.loads(capsys.readouterr().out)["devices"]["cuda:0"]


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("--show",), "NVIDIA Stub has not been calibrated"), (("--plot", "x.svg"), "draws the rates of a CPU"),
        (("--device", "reference"), "device 'reference' is not calibrated"),
    ],
)  # fmt: skip
def test_errors(words: tuple[str, ...], reason: str, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(sys, "argv", ["ridgeline", "calibrate", *words])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 2 and reason in capsys.readouterr().err


class OnCpu(GpuProbe):
    """The probe with torch's CPU operations, timed by the clock."""

    def _seconds(self, run: Callable[[], object]) -> float:
        begin = time.perf_counter()
        run()
        return time.perf_counter() - begin


def test_the_probe_runs_its_operations() -> None:
    probe = OnCpu("cpu")
    assert probe.copy_s(1 << 16) > 0 and probe.launch_s() > 0
    for kind in MULTIPLY:
        assert isinstance(probe.product_s(kind, 64), float), kind


def test_a_type_that_torch_refuses_has_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*given: object, **more: object) -> None:
        raise RuntimeError("torch._scaled_mm needs\n  compute capability 8.9")

    monkeypatch.setattr(torch, "_scaled_mm", refuse)
    assert OnCpu("cpu").product_s("fp8", 64) == "torch._scaled_mm needs compute capability 8.9"
