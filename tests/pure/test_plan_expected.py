"""Expected times beside the roof: bands around medians that no roof exceeds, and collectives as they were measured."""

from __future__ import annotations

import json
from dataclasses import replace
from math import exp
from statistics import NormalDist

import pytest

from ridgeline.catalog.machines import hardware, machines
from ridgeline.catalog.models import find_model
from ridgeline.cost.collectives import all_reduce_s
from ridgeline.cost.efficiency import (
    PERCENTILES,
    Efficiency,
    collective_s,
    efficiency_of,
    expected_step,
    memory_classes,
)
from ridgeline.cost.operations import Forward, Slice
from ridgeline.cost.precision import Precision
from ridgeline.cost.roofline import time_step
from ridgeline.cost.shard import Scheme, device_operations
from ridgeline.errors import RequestError
from ridgeline.plan.expected import expected
from ridgeline.plan.limits import Slo
from ridgeline.plan.planner import Deployment, Load, Planner
from ridgeline.plan.report import plan_json
from ridgeline.plan.slo import search

H100 = hardware("h100")
LLAMA = find_model("llama-3.1-8b").spec
FRACTIONS = (
    "memory", "state", "experts", "codes8", "codes4", "compute16", "compute8", "compute4", "attention", "link",
)  # fmt: skip
PERFECT = dict.fromkeys(FRACTIONS, 1.0) | {"kernel_s": 0.0, "step_s": 0.0, "sequence_s": 0.0}
BATCH = [Slice(8, 1, 1000)]


def test_an_efficiency_of_one_is_the_roof() -> None:
    ops = Forward(LLAMA, Precision()).operations(BATCH)
    found = expected_step(ops, BATCH, H100, Efficiency(PERFECT, "none", {}))
    assert found.seconds == pytest.approx(time_step(ops, H100).seconds)


def test_each_number_changes_the_operations_that_it_names() -> None:
    ops = Forward(LLAMA, Precision("int4")).operations(BATCH)
    base = expected_step(ops, BATCH, H100, Efficiency(PERFECT, "none", {}))

    def change(**values: float) -> dict[str, float]:
        found = expected_step(ops, BATCH, H100, Efficiency({**PERFECT, **values}, "none", {}))
        pairs = zip(found.operations, base.operations, strict=True)
        return {a.operation.name: a.seconds / b.seconds for a, b in pairs if b.seconds}

    state = change(state=0.5)
    assert state["Attention"] == pytest.approx(2) and state["gate+up"] == 1
    codes = change(codes4=0.5)
    assert codes["gate+up"] == pytest.approx(2) and codes["Attention"] == 1
    steps = expected_step(ops, BATCH, H100, Efficiency({**PERFECT, "step_s": 1.0, "sequence_s": 0.5}, "none", {}))
    assert steps.seconds == pytest.approx(base.seconds + 1 + 8 * 0.5)


def test_classes_of_operations() -> None:
    ops = {op.name: op for op in Forward(find_model("gpt-oss-20b").spec, Precision(experts="mxfp4")).operations(BATCH)}
    assert memory_classes(ops["experts.gate+experts.up"]) == ("memory", "experts", "codes4")
    assert memory_classes(ops["q+k+v"]) == ("memory",)
    assert memory_classes(ops["Attention"]) == ("state",)


def test_an_all_reduce_takes_its_measured_time_and_the_roof_is_below() -> None:
    """The first figures are those of the source: 5.0 us at 4 KB on eight H100 with vLLM, 3.6 us with TensorRT-LLM."""
    assert all_reduce_s("h100", 8, 4096, H100.link) == pytest.approx(3.6e-6)
    assert all_reduce_s("h100", 8, 2 * 268435456, H100.link) == pytest.approx(2 * 1088.7e-6)
    for name in ("a100", "h100", "h200", "b200"):
        machine = hardware(name)
        for tp in (2, 4, 8):
            for tokens in (1, 64, 4096):
                slices = [Slice(tokens, 1, 10)]
                for op in device_operations(Forward(LLAMA, Precision()), slices, Scheme(tp=tp)):
                    if op.reduced_bytes and op.messages:
                        roof = time_step([op], machine).seconds / op.layers
                        assert roof <= collective_s(op, machine), (name, tp, tokens)


@pytest.mark.parametrize("machine", [m.name for m in machines() if m.kind == "gpu"])
def test_bands_are_in_order_and_never_beat_the_roof(machine: str) -> None:
    planner, load = Planner(Deployment(LLAMA, hardware(machine))), Load(4, 300, 100)
    roof = planner.figures(load)
    found = expected(planner, load, roof)
    assert found is not None
    for name, band in found.bands.items():
        assert band["p10"] <= band["p50"] <= band["p90"]
        bound = getattr(roof, name)
        assert band["p90"] <= bound * (1 + 1e-9) if "per_s" in name else band["p10"] >= bound * (1 - 1e-9)


def test_a_machine_without_results_has_wider_bands() -> None:
    new = efficiency_of(replace(H100, name="a new machine"))
    assert new is not None and new.known == "none"
    own, family = efficiency_of(H100), efficiency_of(hardware("l4"))
    assert own is not None and family is not None
    assert (own.known, family.known) == ("machine", "family")
    for kind in ("tpot", "ttft", "throughput"):
        assert own.spread[kind] < family.spread[kind] < new.spread[kind]


def test_percentiles_are_those_of_a_log_normal_error() -> None:
    found = Efficiency({}, "none", {"tpot": 0.3})
    assert found.at(2.0, "tpot", PERCENTILES["p90"]) == pytest.approx(2 * exp(0.3 * 1.2816))


def test_json_has_the_percentiles_and_a_cpu_that_was_not_measured_has_none() -> None:
    planner = Planner(Deployment(LLAMA, H100))
    found = json.loads(json.dumps(plan_json("llama", planner, Load(1, 100, 10))))
    assert set(found["expected"]["figures"]["tpot_s"]) == {"p10", "p50", "p90"}
    assert found["expected"]["figures"]["tpot_s"]["p50"] > found["time"]["tpot_s"]
    assert "published results" in found["expected"]["why"]
    assert "expected" not in plan_json("llama", Planner(Deployment(LLAMA, hardware("cpu-laptop"))), Load(1, 100, 10))


def test_a_promise_is_kept_with_the_confidence_that_was_asked_for() -> None:
    deployment, load, promise = Deployment(LLAMA, H100), Load(1, 500, 100), Slo.parse("ttft=500ms,tpot=25ms")
    costs = []
    for confidence in (0.5, 0.9, 0.99):
        found = search(deployment, load, promise, confidence).settings[0]
        assert found.sure_tpot_s <= 0.025 and found.sure_ttft_s <= 0.5
        margin = exp(NormalDist().inv_cdf(confidence) * efficiency_of(H100).spread["tpot"])  # type: ignore[union-attr]
        assert found.sure_tpot_s == pytest.approx(margin * found.figures.served_tpot_s)
        costs.append(found.figures.device_seconds_per_token)
    assert costs == sorted(costs) and costs[0] < costs[-1]  # to be surer costs more
    with pytest.raises(RequestError, match=r"--confidence is 1; it must be at least 0.5"):
        search(deployment, load, promise, 1.0)
