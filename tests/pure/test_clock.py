"""Predicted times on a calibrated machine: curves, passes and terms are monotonic, respect the least time, and are
stored on disk.
"""

from __future__ import annotations

import json
from dataclasses import replace
from math import isclose
from pathlib import Path

import pytest
from calibrated import KEPT, MANY, ONE_ROW, RATES
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline import system
from ridgeline.cost import calibration
from ridgeline.cost.calibrated import Counts, facts_of, far_share, terms_of
from ridgeline.cost.calibration import load, machine_of, save, this_machine
from ridgeline.cost.operations import Forward, Slice
from ridgeline.cost.precision import Precision
from ridgeline.cost.roofline import held_bytes, time_step
from ridgeline.cost.shard import Scheme
from ridgeline.errors import RequestError
from ridgeline.plan.explain import explain
from ridgeline.plan.planner import Deployment, Load, Planner
from ridgeline.settings import EngineOptions, resolve
from ridgeline.settings.advice import BATCHES, CHUNKS, DEPTHS, DRAFT_BATCHES, advise
from ridgeline.spec import Attention, GatedMLP, Layer, Mamba2, ModelSpec, MoE, RMSNorm, Rope
from ridgeline.spec.hardware import Link
from ridgeline.spec.rates import Curve, least

NORM = RMSNorm()


def spec(layer: Layer, layers: int = 4, vocab: int = 1000) -> ModelSpec:
    return ModelSpec("x", vocab, 64, 16384, (layer,) * layers, NORM)


ATTENTION = Attention(4, 2, 16, 0.25, Rope(16))
MODELS = {
    "dense": spec(Layer(ATTENTION, GatedMLP(128), NORM)),
    "window": spec(Layer(replace(ATTENTION, window=100), GatedMLP(128), NORM)),
    "experts": spec(Layer(ATTENTION, MoE(8, 2, 64), NORM)),
    "recurrent": spec(Layer(Mamba2(2, 64, 16, 1, 4, NORM), GatedMLP(128), NORM)),
}
EXACT = Precision("float32", "float32", "float32")


def planner(name: str, precision: Precision = EXACT) -> Planner:
    return Planner(Deployment(MODELS[name], machine_of(KEPT), precision))


@given(st.floats(0.1, 1e6))
def test_a_curve_is_between_its_neighbors_and_flat_beyond(position: float) -> None:
    curve = Curve((1.0, 10.0, 100.0), (5.0, 1.0, 3.0))
    low, high = (5.0, 1.0) if position <= 10 else (1.0, 3.0)
    assert min(low, high) - 1e-12 <= curve.at(position) <= max(low, high) + 1e-12
    assert [curve.at(p) for p in (0.01, 1, 10, 100, 1e9)] == pytest.approx([5, 5, 1, 3, 3])
    assert curve.at(10**0.5) == pytest.approx(5**0.5)


@pytest.mark.parametrize(("points", "values"), [((), ()), ((1.0,), ()), ((2.0, 1.0), (1.0, 1.0)), ((1.0,), (0.0,))])
def test_curves_that_are_invalid(points: tuple[float, ...], values: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match=r"must|needed"):
        Curve(points, values)


def test_the_lesser_of_two_curves() -> None:
    assert least(Curve((1.0, 2.0), (3.0, 1.0)), Curve((1.0, 2.0), (2.0, 5.0))).values == (2.0, 1.0)
    with pytest.raises(ValueError, match="the same"):
        least(Curve((1.0,), (1.0,)), Curve((2.0,), (1.0,)))


def test_a_step_by_hand() -> None:
    """Predict one layer and one token after 99: five matrices, keys and values, and each term once."""
    one = replace(MODELS["dense"], layers=MODELS["dense"].layers[:1])
    found = Planner(Deployment(one, machine_of(KEPT), EXACT)).decode(1, 100)
    numbers = 64 * (64 + 32 + 32) + 64 * 64 + 3 * 64 * 128 + 64 * 1000
    keys = 100 * 2 * 2 * 16
    two = RATES.attention["float32"].near.at(2)
    read = 4 * numbers + 4 * keys
    assert read < 4e6  # the data fits into caches
    ops = Forward(one, EXACT).operations([Slice(1, 1, 100)])
    moved = sum(op.layers * op.activation_bytes for op in ops)
    terms = 1e-4 + 2e-6 + 6 * 2e-6 + 1000 * 1e-10 + moved * 5e-11 + 1e-6
    assert found.seconds == pytest.approx(numbers * ONE_ROW + 2 * keys * two + terms, rel=1e-5)


@pytest.mark.parametrize("name", MODELS)
@given(batch=st.integers(1, 200), context=st.integers(2, 8000), more=st.integers(1, 500))
def test_more_takes_no_less(name: str, batch: int, context: int, more: int) -> None:
    p = planner(name)
    now = p.decode(batch, context).seconds
    assert p.decode(batch + more, context).seconds >= now * (1 - 1e-9)
    assert p.decode(batch, context + more).seconds >= now * (1 - 1e-9)
    assert p.step([Slice(1, min(more, context), context, 0)]).seconds > 0


@pytest.mark.parametrize("name", MODELS)
@settings(deadline=None)
@given(batch=st.integers(1, 100), tokens=st.integers(1, 64), context=st.integers(64, 4000))
def test_no_step_is_faster_than_its_arithmetic(name: str, batch: int, tokens: int, context: int) -> None:
    p = planner(name)
    step = p.step([Slice(batch, tokens, context)])
    products = sum(t.operation.flops * t.operation.layers for t in step.operations if t.operation.passes)
    assert step.seconds >= products / p.deployment.hardware.peak("float32") * (1 - 1e-9)
    assert isclose(sum(step.by_cause().values()), step.seconds)


def test_a_recurrent_state_is_moved_twice_and_held_once() -> None:
    """The share that comes from memory depends on the size of the states, not on the bytes that are moved."""
    batch = (Slice(64, 1, 100),)
    ops = Forward(MODELS["recurrent"], EXACT).operations(batch)
    (core,) = [op for op in ops if op.kind == "state"]
    state = 64 * 4 * (2 * 64 * 16 + 3 * (2 * 64 + 2 * 16))
    assert core.state_bytes == 2 * state and held_bytes(core) == state
    far = far_share(ops, RATES)
    amounts = terms_of(facts_of(MODELS["recurrent"]), Counts.of(ops, batch), far)
    assert amounts["Mamba2 state"] == 4 * state / 4
    assert 0 < amounts["state from memory"] == amounts["Mamba2 state"] * far < amounts["Mamba2 state"]


def test_every_figure_can_be_traced() -> None:
    """The lines of --explain sum up to the time of the step."""
    p, shown = planner("dense"), planner("dense").decode(4, 1024)
    found = dict(explain(p, Load(4, 1000, 24)))
    assert "from memory" in found and "ps +" in found["down"] and "numbers x" in found["Attention"]
    assert shown.seconds == pytest.approx(sum(t.seconds for t in shown.operations) + shown.overhead_s)


def test_the_least_time_of_a_step_knows_what_fits_in_a_cache() -> None:
    """The bytes of a small step come from a cache: the least time has the rate that was measured for so many bytes."""
    sizes, rates = (4e6, 16e6, 64e6, 256e6), (4e11, 3e11, 5e10, 4e10)
    machine = replace(machine_of(KEPT), rates=None, reads=Curve(sizes, rates))
    spec = MODELS["dense"]
    for held, rate in ((1.0, 4e11), (15.9e6, 4e11), (16e6, 3e11), (63e6, 3e11), (64e6, 5e10), (1e9, 4e10)):
        assert machine.read_rate(held) == rate
    ops = Forward(spec, EXACT).operations([Slice(1, 1, 100)])
    held = sum(op.layers * held_bytes(op) for op in ops)
    one = replace(machine, flops_per_s={"float32": 1e30})
    for scale, rate in ((1.0, 4e10), (1e3, 4e11)):  # sizes of the caches, as multiples of those above
        caches = replace(one, reads=Curve(tuple(held * scale * n / 1e9 for n in sizes), rates))
        assert time_step(ops, caches).seconds == pytest.approx(sum(op.layers * op.bytes for op in ops) / rate)
    assert time_step(ops, replace(one, reads=None)).bytes == time_step(ops, one).bytes
    assert time_step(ops, replace(one, reads=None)).seconds > time_step(ops, caches).seconds
    assert machine_of(KEPT).reads == RATES.read["2"]


def test_small_types_and_types_that_were_not_measured() -> None:
    wide = planner("dense").decode(8, 100).seconds
    assert planner("dense", Precision("int8", "float32", "float32", None, "int8")).decode(8, 100).seconds < wide
    # int4 was not measured, so it gets the rates of the next larger type; float16 state gets those of float32
    assert planner("dense", Precision("int4", "float16", "float32", None, "int8")).decode(8, 100).seconds < wide


def test_which_steps_are_replayed() -> None:
    def way(name: str, batch: Slice, *, drafts: bool = False) -> str:
        ops, facts = Forward(MODELS[name], EXACT).operations([batch]), facts_of(MODELS[name], drafts=drafts)
        (found,) = [term for term in terms_of(facts, Counts.of(ops, [batch]), 0.0) if term.endswith(" step")]
        return found

    assert [way(name, Slice(32, 1, 10)) for name in ("dense", "recurrent")] == ["replayed step"] * 2
    assert [way("dense", batch) for batch in (Slice(33, 1, 10), Slice(1, 2, 10))] == ["plain step"] * 2
    verified = Slice(1, 3, 10, 3)
    assert [way(n, verified, drafts=True) for n in ("dense", "recurrent")] == ["replayed step", "plain step"]


def test_a_calibration_is_stored_completely(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert load() is None
    machine, note = this_machine()
    assert machine.rates is None and "not calibrated" in note and "ridgeline calibrate" in note
    path = save(KEPT)
    assert load() == KEPT and [p.name for p in path.parent.iterdir()] == [path.name]
    machine, note = this_machine()
    assert machine.rates == RATES and note.startswith("calibrated on 2026-11-22 while other programs used 0% of the")
    assert machine.read_bytes_per_s == 4e10 and machine.peak("float32") == pytest.approx(2 / MANY)


def test_a_busy_calibration_never_replaces_a_quieter_one() -> None:
    quiet, busy, busier = (replace(KEPT, others=share) for share in (0.02, 0.3, 0.5))
    assert quiet.may_replace(busy) and quiet.may_replace(None) and busier.may_replace(None)
    assert replace(KEPT, others=0.09).may_replace(quiet), "too little to make rates lower"
    assert not busy.may_replace(quiet) and not busier.may_replace(busy) and busy.may_replace(busier)


def test_a_plan_repeats_the_conditions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    save(replace(KEPT, others=0.3, speed_change=-0.2, threads_per_core=2))
    _, note = this_machine()
    for part in ("used 30% of the machine", "its speed changed by 20%", "one of the 2 hardware threads", "again when"):
        assert part in note
    save(replace(KEPT, others=0.03))
    assert "again when" not in this_machine()[1] and "used 3% of the machine" in this_machine()[1]


@pytest.mark.parametrize(("text", "count"), [("0", 1), ("0,4", 2), ("0-1", 2), ("0-3,8", 5)])
def test_hardware_threads_of_a_core(text: str, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "SIBLINGS", tmp_path / "list")
    assert system.threads_per_core() == 1
    (tmp_path / "list").write_text(f"{text}\n")
    assert system.threads_per_core() == count


@pytest.mark.parametrize(
    "change", [{"format": 99}, {"machine": {"cpu": "another"}}, {"rates": 5}, {"date": None, "x": 1}]
)
def test_calibrations_that_are_not_of_this_machine(
    change: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = save(KEPT)
    value = json.loads(path.read_text())
    path.write_text(json.dumps({**value, **change}))
    assert load() is None
    path.write_text("{")
    assert load() is None


def test_another_version_has_another_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    save(KEPT)
    monkeypatch.setattr(calibration, "version", lambda name: "99.0")
    assert load() is None


def test_advice_has_a_reason_for_each_setting() -> None:
    found = advise(Deployment(MODELS["dense"], machine_of(KEPT), EXACT))
    assert found is not None
    assert found.max_num_seqs <= found.max_num_batched_tokens
    assert set(found.reasons) == {
        "max_num_seqs", "max_num_batched_tokens", "threads", "num_speculative_tokens", "preemption",
    }  # fmt: skip
    p = planner("dense").with_chunk(found.max_num_batched_tokens)
    assert found.preempt.seconds_per_token == pytest.approx(p.ttft_s(1024) / 1024)
    assert found.preempt.seconds_per_byte == 2 / 1e10  # copied twice
    assert set(found.drafts) == set(DRAFT_BATCHES) and set(found.drafts.values()) <= {0, *DEPTHS}
    assert found.max_num_seqs in BATCHES and found.max_num_batched_tokens in CHUNKS
    assert advise(Deployment(MODELS["dense"], replace(machine_of(KEPT), rates=None), EXACT)) is None


def test_the_settings_show_how_sequences_are_preempted() -> None:
    found = advise(Deployment(MODELS["dense"], machine_of(KEPT), EXACT))
    assert found is not None

    def shown(swap: int) -> dict[str, str]:
        options = EngineOptions(swap_space_bytes=swap)
        config = resolve(MODELS["dense"], 4096, options, free_bytes=4 << 30, fixed_len=True, advice=found)
        assert config.preempt == found.preempt
        return {s.name: s.value for s in config.settings()}

    assert shown(1 << 28)["preemption"] in ("swap", "recompute")
    assert "preemption" not in shown(0)


def test_devices_of_this_machine_send_through_its_memory() -> None:
    deployment = Deployment(MODELS["dense"], machine_of(KEPT), EXACT)
    two = Planner(replace(deployment, scheme=Scheme(tp=2)))
    step = two.decode(64, 100)
    sent = sum(t.operation.link_bytes * t.operation.layers for t in step.operations)
    assert sent > 0 and sum(t.link_s for t in step.operations) == pytest.approx(sent / 1e10)
    slower = replace(machine_of(KEPT), link=Link("x", 1e9, 1e-3))
    assert Planner(replace(two.deployment, hardware=slower)).decode(64, 100).seconds > step.seconds
    lone = replace(machine_of(KEPT), link=None)
    with pytest.raises(RequestError, match="no link"):
        Planner(replace(two.deployment, hardware=lone)).decode(64, 100)
