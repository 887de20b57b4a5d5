"""Weights and state in the host's memory: bytes, waits and limits by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ridgeline.catalog.hardware_file import read_hardware
from ridgeline.catalog.machines import hardware, machines
from ridgeline.catalog.models import find_model
from ridgeline.cost.shard import Scheme
from ridgeline.errors import RequestError
from ridgeline.plan.changes import change
from ridgeline.plan.compare import compare
from ridgeline.plan.offload import NAME, Offload
from ridgeline.plan.planner import Deployment, Load, Planner
from ridgeline.sim import cost_of

SPEC = find_model("llama-3.1-8b").spec
PLAIN = Deployment(SPEC, hardware("rtx4090"))
LOAD = Load(1, 900, 100)


def test_a_step_waits_for_the_host() -> None:
    """At batch 1 a step reads all weights; half of them over PCIe 4.0 (32 GB/s) take longer than all from memory."""
    plain, half = (Planner(d).decode(1, 1000) for d in (PLAIN, change(PLAIN, "offload=weights:0.5").deployment))
    weights = sum(t.operation.layers * t.operation.weight_bytes for t in plain.operations)
    assert half.seconds == pytest.approx(weights / 2 / 32e9 + 5e-6)
    assert half.operations[-1].operation.name == NAME and half.operations[-1].bound == "link"
    assert half.seconds > 7 * plain.seconds
    # A long prompt computes for longer than the weights take to arrive: nothing is lost.
    slow = replace(PLAIN, hardware=replace(PLAIN.hardware, flops_per_s={"bfloat16": 1e12}))
    prompt = [next(iter(Planner(d).chunks(512))) for d in (slow, replace(slow, offload=Offload(0.5)))]
    assert prompt[0].seconds == prompt[1].seconds


def test_memory_is_freed_on_the_device() -> None:
    plain, weights, state = (
        Planner(d).footprint(LOAD) for d in (PLAIN, replace(PLAIN, offload=Offload(weights=0.25)),
                                             replace(PLAIN, offload=Offload(state=0.5)))
    )  # fmt: skip
    assert weights.weight_bytes == 0.75 * plain.weight_bytes and weights.pages_bytes == plain.pages_bytes
    assert state.pages_bytes == 0.5 * plain.pages_bytes and state.formula_bytes == 0.5 * plain.formula_bytes
    big = Deployment(find_model("qwen2.5-14b").spec, hardware("rtx4090"))
    assert not Planner(big).footprint(LOAD).fits
    assert Planner(change(big, "offload=weights:0.4").deployment).footprint(LOAD).fits


def test_state_is_sent_in_each_step() -> None:
    planner = Planner(replace(PLAIN, offload=Offload(state=1.0)))
    step = planner.decode(64, 4096)
    assert step.operations[-1].operation.link_bytes == pytest.approx(64 * 4096 * 131072, rel=1e-3)
    both = replace(PLAIN, offload=Offload(0.5, 0.5))
    assert change(change(PLAIN, "offload=weights:0.5").deployment, "offload=state:0.5").deployment == both
    shared = replace(PLAIN, scheme=Scheme(tp=2), offload=Offload(0.5))  # each device has a link of its own
    alone = Planner(replace(PLAIN, offload=Offload(0.5))).decode(1, 1000).operations[-1].operation.link_bytes
    assert Planner(shared).decode(1, 1000).operations[-1].operation.link_bytes == pytest.approx(alone / 2, rel=1e-3)


def test_it_is_ranked_with_its_price() -> None:
    rows = {row.text: row for row in compare(PLAIN, LOAD, ["offload=weights:0.2", "offload=state:0.2"])}
    assert rows["offload=weights:0.2"].largest_batch > rows["unchanged"].largest_batch
    assert "waits for this share" in rows["offload=weights:0.2"].gives_up


@pytest.mark.parametrize(("machine", "text", "message"), [
    ("h100", "offload=weights:1.5", "must be from 0 to 1"), ("h100", "offload=weights", "share of weights or state"),
    ("h100", "offload=experts:0.5", "share of weights or state"), ("h100", "offload=weights:x", "could not convert"),
    ("cpu-server", "offload=weights:0.5", "has no other memory"), ("v5e", "offload=weights:0.5", "is not known; give"),
])  # fmt: skip
def test_wrong_values(machine: str, text: str, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        change(Deployment(SPEC, hardware(machine)), text)


def test_hosts_have_sources_and_the_simulator_refuses(tmp_path: object) -> None:
    known = [m for m in machines() if m.host is not None]
    assert len(known) == 9 and all(m.host and len(m.host.source) > 10 for m in known)
    with pytest.raises(RequestError, match="are not simulated"):
        cost_of(replace(PLAIN, offload=Offload(0.5)))


def test_a_file_names_the_link_to_the_host(tmp_path: object) -> None:
    from pathlib import Path

    path = Path(str(tmp_path)) / "card.toml"
    path.write_text('host = "pcie5"\nmemory_gb = 24\nbandwidth_gb_per_s = 1000\n[tflops]\nbfloat16 = 100\n')
    host = read_hardware(path).host
    assert host is not None and host.bytes_per_s == 64e9
