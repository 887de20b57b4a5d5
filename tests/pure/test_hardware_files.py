"""Machines from files: TOML that a user writes, and calibrations that another machine carried away."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from calibrated import KEPT

from ridgeline.catalog.hardware_file import MOST_BYTES, read_hardware
from ridgeline.catalog.machines import hardware, link
from ridgeline.catalog.models import find_model
from ridgeline.cli.main import main
from ridgeline.cost.calibration import carried, carry, find_machine, machine_of
from ridgeline.cost.gpu_calibration import GpuCalibration, GpuRates, machine_of_gpu
from ridgeline.errors import RidgelineError
from ridgeline.plan.planner import Deployment, Load, Planner
from ridgeline.sim import cost_of

H100 = """
kind = "gpu"
memory_gb = 80
bandwidth_gb_per_s = 3350
link = "nvlink4"
[tflops]
float32 = 67
bfloat16 = 989
float16 = 989
int8 = 1979
fp8 = 1979
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "card.toml"


def test_the_catalogs_h100_from_a_file_gives_the_same_figures(file: Path) -> None:
    file.write_text(H100)
    machine, note = find_machine(str(file))
    assert "lower bounds by the roofline" in note
    assert machine.name == "card" and machine.link == link("nvlink4") and not machine.is_measured
    assert machine.sources["bandwidth"] == "given in card.toml"
    load, spec = Load(8, 1000, 100), find_model("llama-3.1-8b").spec
    found, known = (Planner(Deployment(spec, m)).figures(load) for m in (machine, hardware("h100")))
    assert found == known


def test_a_link_of_its_own(file: Path) -> None:
    text = H100.replace('link = "nvlink4"', "").replace('kind = "gpu"', 'name = "mine"\nsource = "a sheet"')
    file.write_text(text + "[link]\ngb_per_s = 64\nlatency_us = 5\ndevices = 4\n")
    machine = read_hardware(file)
    assert machine.name == "mine" and machine.kind == "gpu" and machine.sources["memory"] == "a sheet"
    assert machine.link is not None
    assert (machine.link.bytes_per_s, machine.link.latency_s, machine.link.most_devices) == (64e9, 5e-6, 4)


@pytest.mark.parametrize(("old", "new", "message"), [
    ("memory_gb = 80", "", "memory_gb is missing"), ("memory_gb = 80", "memory_gb = -1", "memory_gb is -1; it must be"),
    ("memory_gb = 80", "memory_gb = nan", "memory_gb is nan"), ("memory_gb = 80", "memory_gb = true", "is True; it"),
    ("memory_gb = 80", "memory_gb = '80'", "memory_gb is '80'"), ("memory_gb = 80", "memory_gb = 1e400", "is inf"),
    ("memory_gb", "memory", "unknown field 'memory'; did you mean memory_gb"), ("bfloat16 = 989", "bf17 = 1", "'bf17'"),
    ("bfloat16 = 989", "bfloat16 = 0", "bfloat16 of [tflops] is 0; it must be a number above 0"),
    ('kind = "gpu"', 'kind = "npu"', "kind is 'npu'; it must be gpu, tpu, cpu"), ("nvlink4", "nvlink9", "unknown link"),
    ('link = "nvlink4"', "link = 3", "[link] is missing or no table"), ("[tflops]", "[tflops", "is no TOML file"),
    ('kind = "gpu"', 'name = ""', "name is ''"), ('kind = "gpu"', 'name = "a\\nb"', "must be a text"),
    ('link = "nvlink4"', "link = {gb_per_s = 1, devices = 1.5}", "devices of [link] is 1.5; it must be a whole number"),
    ('link = "nvlink4"', "link = {latency_us = 1}", "gb_per_s of [link] is missing"),
])  # fmt: skip
def test_wrong_files_give_one_line(file: Path, old: str, new: str, message: str) -> None:
    assert old in H100
    file.write_text(H100.replace(old, new, 1))
    with pytest.raises(RidgelineError) as caught:
        read_hardware(file)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_files_that_cannot_be_read(file: Path, tmp_path: Path) -> None:
    with pytest.raises(RidgelineError, match=r"card\.toml cannot be read: No such file"):
        read_hardware(file)
    file.write_text("#" * (MOST_BYTES + 1))
    with pytest.raises(RidgelineError, match="bytes"):
        read_hardware(file)
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(RidgelineError, match="no TOML file"):
        read_hardware(file)
    file.write_text("a = " + "[" * 20_000)
    with pytest.raises(RidgelineError, match="no TOML file"):
        read_hardware(file)
    with pytest.raises(RidgelineError):
        read_hardware(tmp_path)


def test_a_carried_calibration_predicts_as_at_home(tmp_path: Path) -> None:
    path, home = tmp_path / "server.json", machine_of(KEPT)
    carry(KEPT, path)
    machine, note = find_machine(str(path))
    assert machine.rates == home.rates and machine.memory_bytes == home.memory_bytes and machine.link == home.link
    assert "this machine" not in machine.name and f"{KEPT.conditions}, as {path} says" in note
    deployment = Deployment(find_model("gemma-3-1b").spec, machine)
    load = Load(4, 100, 20)
    at_home = Planner(Deployment(find_model("gemma-3-1b").spec, home)).figures(load)
    assert Planner(deployment).figures(load) == at_home
    assert cost_of(deployment).seconds(1, 1, cost_of(deployment).of(1, 100)) > 0


def test_a_carried_calibration_of_a_gpu(tmp_path: Path) -> None:
    rates = GpuRates(80 * 10**9, 3e12, {"bfloat16": 7e14, "fp8": 1.4e15}, 5e-6, 2e-6, 1e-5, 5e10, 5e10)
    found = GpuCalibration({"gpu": "NVIDIA H100"}, rates, "2026-11-20", 30.0)
    carry(found, tmp_path / "gpu.json")
    machine, note = carried(tmp_path / "gpu.json")
    assert machine == machine_of_gpu(found) and "NVIDIA H100, calibrated on 2026-11-20, as" in note


def test_files_that_are_no_calibration(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    carry(KEPT, path)
    good = json.loads(path.read_text())
    broken: list[Any] = [
        "text", [], {}, good | {"format": 1}, good | {"kind": "tpu"}, good | {"memory_bytes": "x"}, good | {"more": 1},
        good | {"rates": {}}, good | {"memory_bytes": 0}, good | {"machine": {}},
    ]  # fmt: skip
    for value in broken:
        path.write_text(json.dumps(value))
        with pytest.raises(
            RidgelineError, match=r"is no calibration; write one with `ridgeline calibrate --out x\.json`"
        ):
            carried(path)
    path.write_text("[" * 100_000)
    with pytest.raises(RidgelineError, match="is no calibration"):
        carried(path)
    with pytest.raises(RidgelineError, match="cannot be read"):
        carried(tmp_path / "none.json")


def test_the_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A calibration that is kept is carried by `calibrate --show --out`, and planned and simulated from the file."""
    from ridgeline.cost.calibration import save

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    save(KEPT)

    def run(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["ridgeline", *words])
        with pytest.raises(SystemExit) as caught:
            main()
        captured = capsys.readouterr()
        return int(caught.value.code or 0), captured.out, captured.err

    assert run("calibrate", "--device", "cpu", "--show", "--out", "box.json")[0] == 0
    status, out, _ = run("plan", "gemma-3-1b", "--hardware", "box.json", "--context", "256")
    assert status == 0 and "as box.json says" in " ".join(out.split())
    words = ("--num-requests", "3", "--input-len", "20", "--output-len", "4", "--max-model-len", "512")
    status, out, _ = run("simulate", "pocket", "--hardware", "box.json", *words)
    assert status == 0 and "calibrated on" in out
    status, out, err = run("calibrate", "--device", "cpu", "--show", "--out", "box")
    assert status == 2 and not out and "--out is box; the name must end in .json" in err
    status, _, err = run("calibrate", "--device", "cpu", "--show", "--out", "box.json/x.json")
    assert status == 2 and "cannot be written" in err and err.count("\n") == 1
