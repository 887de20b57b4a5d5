"""A plan says what it takes for granted: missing units, too many devices, narrower types, bounds beside predictions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from calibrated import KEPT

from ridgeline.catalog.machines import hardware, link
from ridgeline.catalog.models import find_model
from ridgeline.cli.flags.known import precision_of, published_type
from ridgeline.cost.calibration import machine_of
from ridgeline.cost.precision import Precision
from ridgeline.cost.shard import Scheme
from ridgeline.errors import RequestError
from ridgeline.plan.changes import change
from ridgeline.plan.limits import Slo
from ridgeline.plan.planner import Deployment, Load
from ridgeline.plan.remarks import remarks
from ridgeline.plan.slo import search

LLAMA = find_model("llama-3.1-8b").spec


def on(name: str, **more: Any) -> Deployment:
    return Deployment(LLAMA, hardware(name), **more)


def test_narrow_activations_without_a_unit_are_said() -> None:
    narrow = Precision(activations="fp8")
    (said,) = remarks(on("a100", precision=narrow))
    assert said.startswith("a100 has no unit for fp8: products with fp8 activations run in bfloat16")
    assert remarks(on("h100", precision=narrow)) == ()
    assert remarks(on("a100", precision=Precision(activations="int8"))) == ()
    assert remarks(on("a100")) == ()


def test_more_devices_than_a_link_joins_are_said() -> None:
    (said,) = remarks(on("h100", scheme=Scheme(tp=16)))
    assert "nvlink4 joins 8 devices at most, and this plan lets 16 share" in said
    assert remarks(on("h100", scheme=Scheme(tp=8, replicas=4))) == ()
    wide = replace(hardware("h100"), link=link("infiniband-400g"))
    assert remarks(Deployment(LLAMA, wide, scheme=Scheme(tp=16))) == ()
    assert remarks(on("v5e", scheme=Scheme(tp=16))) == ()


@pytest.mark.parametrize("name", ["google/gemma-2-2b", "google/gemma-2-27b", "allenai/OLMo-2-1124-7B"])
def test_float32_checkpoints_are_bfloat16_on_a_gpu(name: str) -> None:
    known = find_model(name)
    assert known.weights == "float32"
    found = precision_of(known, hardware("h100"))
    assert {found.weights, found.state, found.activations, found.wide, found.compute} == {"bfloat16"}
    asked = precision_of(known, hardware("h100"), weights="float32")
    assert (asked.weights, asked.activations) == ("float32", "float32")
    assert precision_of(known, hardware("cpu-server")).weights == "float32"
    measured = replace(hardware("h100"), step_overhead_s=1e-5)  # our own engine keeps what the files have
    assert published_type(known, measured) == "float32"


@pytest.mark.parametrize(("changes", "reason"), [
    ("mla=512+64,cla=2", "cla=2: only layers with keys and values can share them, and the model, as changed so far, "
     "has LatentAttention in 32 layers"),
    ("hybrid=mamba,kv_heads=2", "no attention layer with KV heads: the model has Mamba in 32 layers"),
])  # fmt: skip
def test_changes_that_exclude_each_other_say_why(changes: str, reason: str) -> None:
    with pytest.raises(RequestError) as caught:
        change(Deployment(find_model("mistral-7b").spec, hardware("h100")), changes)
    assert reason in str(caught.value)


def test_bounds_of_other_machines_are_marked_beside_predictions() -> None:
    spec = find_model("gemma-3-1b").spec
    own = Deployment(spec, machine_of(KEPT), Precision(activations="float32"))
    answer = search(own, Load(1, 64, 64), Slo(tpot_s=0.01))
    rows = [*answer.settings, *answer.otherwise]
    assert rows and all(row.is_bound == row.changed.startswith("--hardware") for row in rows)
    assert any(row.is_bound for row in rows)
