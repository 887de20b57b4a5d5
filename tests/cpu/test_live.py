"""The data of the live page: percentiles of the last minute, and the last step beneath the roofline."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from calibrated import KEPT

import ridgeline
from ridgeline import LLM, SamplingParams
from ridgeline.archs import spec_from_config
from ridgeline.cost.calibration import machine_of
from ridgeline.cost.operations import Slice, operations
from ridgeline.cost.precision import Precision
from ridgeline.cost.roofline import time_step
from ridgeline.plan.planner import Deployment
from ridgeline.serve.engine import machine
from ridgeline.serve.engine.machine import StepLedger
from ridgeline.serve.engine.meters import RecentHistogram
from ridgeline.settings import EngineOptions
from ridgeline.spec.hardware import HardwareSpec

POCKET = Path(ridgeline.__file__).parent / "models" / "pocket" / "config.json"


def test_percentiles_of_the_last_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    found, clock = RecentHistogram((0.5, 1.0)), [1000.0]
    monkeypatch.setattr("ridgeline.serve.engine.meters.time.perf_counter", lambda: clock[0])
    assert found.recent(clock[0]) is None
    found.observe(99.0)
    clock[0] += 61
    for value in (0.1, 0.2, 0.3, 0.4):
        found.observe(value)
    last = found.recent(clock[0])
    assert last is not None and last.p50 == pytest.approx(0.25) and last.p99 == pytest.approx(0.397)
    assert found.counts == [4, 0, 1] and found.recent(clock[0] + 61) is None
    for _ in range(2000):
        found.observe(2.0)
    assert len(pickle.dumps(found)) < 40_000  # the data goes through the pipe every second


def test_a_step_beneath_the_roofline() -> None:
    """Bytes and operations equal those of the planner for the same step; equal sequences are counted together."""
    spec = spec_from_config(json.loads(POCKET.read_text()))
    hardware = HardwareSpec("m", 10**9, 1e9, {"float32": 1e9}, kind="cpu")
    precision = Precision("float32", "float32", "float32")
    ledger = StepLedger(Deployment(spec, hardware, precision))
    shape = ((1, 40, 1), (1, 40, 1), (16, 16, 0))
    found = ledger.figures(shape, 0.5)
    wanted = time_step(operations(spec, [Slice(2, 1, 40), Slice(1, 16, 16, 0)], precision), hardware)
    assert found == {
        "tokens": 18, "sequences": 3, "bytes": wanted.bytes, "flops": wanted.flops, "measured_s": 0.5,
        "predicted_s": None,
    }  # fmt: skip
    assert ledger.roof() == {"bytes_per_s": 1e9, "flops_per_s": 1e9} and ledger.figures((), 0.5) is None


def test_a_calibrated_machine_predicts_its_steps() -> None:
    """The prediction uses the terms of the calibration, which include the host's time."""
    spec = spec_from_config(json.loads(POCKET.read_text()))
    ledger = StepLedger(Deployment(spec, machine_of(KEPT), Precision("float32", "float32", "float32")))
    found = ledger.figures(((1, 40, 1),), 0.5)
    assert found is not None and found["predicted_s"] is not None
    cost = ledger.cost(((1, 40, 1),))
    assert cost.predicted_s == cost.seconds > 0 and cost.seconds != cost.roof_s
    assert found["predicted_s"] == pytest.approx(cost.seconds, rel=0.05)


def test_the_total_cost_of_steps() -> None:
    """Sequences of one token may be counted at their mean context, which is exact for attention without a window."""
    spec = spec_from_config(json.loads(POCKET.read_text()))
    hardware = HardwareSpec("m", 10**9, 1e9, {"float32": 1e9}, kind="cpu")
    precision = Precision("float32", "float32", "float32")
    ledger = StepLedger(Deployment(spec, hardware, precision))
    for shape in (((1, 32, 1), (1, 64, 1)), ((1, 48, 1), (16, 16, 0)), ((1, 2, 1),), ((3, 40, 3),)):
        slices = [Slice(1, tokens, context, sampled) for tokens, context, sampled in shape]
        wanted = time_step(operations(spec, slices, precision), hardware)
        for _ in range(2):
            found = ledger.cost(shape)
            tolerance = 0.01 if shape == ((1, 2, 1),) else 1e-9
            assert found == pytest.approx(
                (wanted.bytes, wanted.flops, wanted.seconds, wanted.seconds, 0.0), rel=tolerance
            ), shape


@pytest.mark.parametrize(("driver", "calibrated"), [(None, False), (2, True), (3, False)])
def test_a_calibration_holds_for_its_threads_and_kernels(
    driver: int | None, calibrated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The CPU's calibration does not hold for torch on the CPU (without a driver), or for another number of threads.
    tests/cpu/test_gpu_calibration.py has a GPU's.
    """
    found = SimpleNamespace(rates=SimpleNamespace(threads=2))
    monkeypatch.setattr("ridgeline.measure.predict.this_machine", lambda: (found, ""))
    monkeypatch.setattr(machine, "_measured", lambda llm: "measured")
    monkeypatch.setattr(machine, "planner_of", lambda loaded, config, given: SimpleNamespace(deployment=given))
    device, threads = ("reference", None) if driver is None else ("cpu", SimpleNamespace(threads=driver))
    table = SimpleNamespace(driver=threads, memory=SimpleNamespace(device=device))
    config = SimpleNamespace(speculative="off")
    llm: Any = SimpleNamespace(config=config, loaded=SimpleNamespace(table=table), draft_spec=None)
    assert (machine.deployment_of(llm) is found) == calibrated


def test_computed_tokens_are_reported_once() -> None:
    """With two steps in flight, the last step only returns tokens that the step before it computed, and adds nothing to
    the sum.
    """
    llm = LLM("pocket", engine=EngineOptions(steps_in_flight=2))
    request = llm.frontend.request({"prompt_token_ids": [5] * 40}, SamplingParams(max_tokens=6, ignore_eos=True), 0)
    llm.session.add(request, lambda chunk: None)
    shapes = []
    while len(llm.session):
        llm.session.step()
        shapes.append(llm.session.last_step())
    prompt = len(request.prompt_token_ids)
    assert sum(tokens for shape in shapes for tokens, _, _ in shape) == prompt + 5 and shapes[-1] == ()
    stats = llm.stats()
    assert stats is not None and stats.last_step == ((1, prompt + 5, 1),)
