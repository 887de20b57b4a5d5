"""Techniques as changes, comparisons, and settings within latency limits."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ridgeline.catalog.machines import hardware
from ridgeline.catalog.models import find_model
from ridgeline.cost.footprint import formula_bytes
from ridgeline.cost.precision import Precision, default_precision, storage_type
from ridgeline.errors import RequestError
from ridgeline.plan.changes import CHANGES, change
from ridgeline.plan.compare import BASE, compare
from ridgeline.plan.limits import Slo
from ridgeline.plan.planner import Deployment, Load, Planner
from ridgeline.plan.rewrite import RECURRENT, with_recurrent
from ridgeline.plan.slo import kept, search, smallest_fit
from ridgeline.settings import choose_storage
from ridgeline.spec import Attention, LatentAttention, SharedAttention, from_json, to_json

H100 = hardware("h100")
MISTRAL = Deployment(find_model("mistral-7b").spec, H100)
LLAMA = Deployment(find_model("llama-3.1-8b").spec, H100)


def state(deployment: Deployment, context: int = 4096) -> float:
    return formula_bytes(deployment.spec, deployment.precision, context)


@pytest.mark.parametrize(("text", "factor"), [
    ("kv_heads=32", 4), ("kv_heads=1", 1 / 8), ("mla=512+64", 576 / 2048), ("cla=2", 1 / 2), ("cla=4", 1 / 4),
    ("kv=fp8", 1 / 2), ("kv=float32", 2), ("cla=2,kv=fp8", 1 / 4), ("prune=layers:0.5", 1 / 2),
])  # fmt: skip
def test_state_changes_as_the_papers_say(text: str, factor: float) -> None:
    """State is proportional to heads (2305.13245), has 576 numbers instead of heads (2405.04434), or is in one layer of
    s (2405.12981).
    """
    after = change(LLAMA, text).deployment
    assert state(after) == pytest.approx(factor * state(LLAMA))
    assert from_json(to_json(after.spec)) == after.spec


@pytest.mark.parametrize(("weights", "wanted"), [("int8", "float16"), ("bf16", "float16"), ("float32", "float32")])
def test_state_on_a_cpu_is_what_the_engine_takes(weights: str, wanted: str) -> None:
    """Until the user chooses a type of state, it is the engine's choice for the weights, also after a change."""
    engine, _ = choose_storage("auto", storage_type(weights))
    cpu = hardware("cpu-server")
    for stored in ("float32", "bfloat16"):
        precision = default_precision(cpu, stored, stored)
        after = change(Deployment(LLAMA.spec, cpu, precision), f"weights={weights}").deployment
        assert after.precision.state == engine.dtype == wanted
        given = default_precision(cpu, stored, stored, state="bfloat16")
        after = change(Deployment(LLAMA.spec, cpu, given), f"weights={weights}").deployment
        assert after.precision.state == "bfloat16"
    chosen = Deployment(LLAMA.spec, cpu, default_precision(cpu, "float32", "float32"))
    assert change(chosen, f"kv=fp8,weights={weights}").deployment.precision.state == "fp8"


@pytest.mark.parametrize(("context", "factor"), [(8192, 3.8), (32768, 5.3), (131072, 6.0)])
def test_windows_of_gemma_3(context: int, factor: float) -> None:
    """With windows of 1,024 in five of six layers, 10 of 62 layers keep all tokens (2503.19786)."""
    layers = (LLAMA.spec.layers * 2)[:62]
    base = replace(LLAMA, spec=replace(LLAMA.spec, layers=layers))
    after = change(base, "window=1024:5").deployment
    windows = [m.window for x in after.spec.layers if isinstance(m := x.mixer, Attention)]
    assert windows.count(None) == 10
    assert state(base, context) / state(after, context) == pytest.approx(factor, abs=0.05)


def test_forms() -> None:
    spec = change(LLAMA, "mla=512+64").deployment.spec
    assert all(isinstance(x.mixer, LatentAttention) for x in spec.layers)
    shared = [x.mixer.source for x in change(LLAMA, "cla=3").deployment.spec.layers
              if isinstance(x.mixer, SharedAttention)]  # fmt: skip
    assert shared[:4] == [0, 0, 3, 3]
    for kind in RECURRENT:
        hybrid = with_recurrent(LLAMA.spec, kind, 7)
        assert sum(isinstance(x.mixer, Attention) for x in hybrid.layers) == 4
        assert not any(isinstance(x.mixer, Attention) for x in with_recurrent(LLAMA.spec, kind, None).layers)
        assert formula_bytes(hybrid, Precision(), 100_000) < state(LLAMA, 100_000) / 6
        Planner(change(LLAMA, f"hybrid={kind}:7").deployment).figures(Load(2, 100, 10))
    linear = change(LLAMA, "linear=64:7").deployment.spec
    assert formula_bytes(linear, Precision(), 100_000) == formula_bytes(linear, Precision(), 1_000)
    half = change(LLAMA, "prune=0.5").deployment.spec
    assert half.layers[0].mlp.intermediate_size == 7168  # type: ignore[union-attr]
    fewer = change(LLAMA, "prune=heads:0.5").deployment.spec.layers[0].mixer
    assert isinstance(fewer, Attention)
    assert (fewer.num_heads, fewer.num_kv_heads) == (16, 8)
    moe = change(Deployment(find_model("deepseek-v2-lite").spec, H100), "prune=0.25").deployment.spec
    assert moe.num_params() < 0.8 * 15.7e9


@pytest.mark.parametrize(("text", "message"), [
    ("kv_head=3", r"unknown change 'kv_head=3'; did you mean kv_heads"), ("kv_heads", "write kv_heads=8"),
    ("kv_heads=5", "num_heads 32 is not a multiple of num_kv_heads 5"), ("kv_heads=x", "write kv_heads=8"),
    ("kv_heads=-1", "-1 is below 1"), ("cla=1", "1 is below 2"),
    ("cla=33", "has 32 with equal attention; use at most 32"), ("weights=int9", "type 'int9' is not known"),
    ("hybrid=rwkv:3", "is not a recurrent mixer; use mamba"), ("prune=1.5", "the share must be between 0 and 1"),
    ("prune=embed:0.5", "cannot be pruned"), ("speculate=2:4", "must be from 0 to 1"), ("tp=3", "tp 3 does not divide"),
    ("prefix=1", "at least 0 and below 1"), ("window=0", "0 is below 1"), ("kv=fp8,,", "unknown change ''"),
])  # fmt: skip
def test_changes_that_cannot_be(text: str, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        change(LLAMA, text)


def test_models_without_heads_refuse_changes_of_them() -> None:
    for text in ("kv_heads=1", "mla=512+64", "window=8", "cla=2"):
        with pytest.raises(RequestError, match=text.split("=")[0]):
            change(Deployment(find_model("mamba-2.8b").spec, H100), text)


def test_comparison_of_the_issue() -> None:
    changes = "kv_heads=32 mla=512+64 window=1024:5 cla=2 weights=int4 kv=fp8 replicas=4 tp=2 speculate=0.8:4".split()
    rows = compare(MISTRAL, Load(4, 3072, 1024), changes)
    speed = [r.figures.tokens_per_s for r in rows]
    assert speed == sorted(speed, reverse=True)
    assert {r.text for r in rows} == {BASE, *changes}
    assert all(r.gives_up for r in rows if r.text != BASE)
    by = {r.text: r for r in rows}
    assert by["replicas=4"].figures.tokens_per_s == 4 * by[BASE].figures.tokens_per_s
    assert by["replicas=4"].tokens_per_s_per_device == by[BASE].tokens_per_s_per_device
    assert by["tp=2"].figures.tpot_s < by[BASE].figures.tpot_s < by["kv_heads=32"].figures.tpot_s
    assert by["kv=fp8"].sequence_bytes * 2 == by[BASE].sequence_bytes
    assert not by[BASE].notes  # it was said here, of a change that nobody had made
    assert "as if each query head" in by["kv_heads=32"].notes[0]
    assert "3.36 tokens" in by["speculate=0.8:4"].notes[0]
    assert by["kv_heads=32"].sequence_bytes * 4 == pytest.approx(8.59e9, rel=1e-3)


def test_every_change_has_a_form_that_works() -> None:
    for name, (form, _) in CHANGES.items():
        if name != "ep":
            plain = LLAMA if name == "diffusion" else MISTRAL  # blocks have no windows
            assert change(plain, form.split(": ")[0]).gives_up


def test_settings_that_do_not_fit_are_listed_last() -> None:
    load = Load(1, 3000, 1000)
    rows = compare(Deployment(find_model("llama-3.1-70b").spec, H100), load, ["weights=int4", "tp=4", "cla=2"])
    assert [r.footprint.fits for r in rows] == [True, True, False, False]


def test_limits_are_met_at_the_least_cost() -> None:
    spec, load = find_model("llama-3.1-70b").spec, Load(1, 1024, 256)
    promise = Slo.parse("ttft=200ms, tpot=30ms")
    answer = search(Deployment(spec, hardware("h200")), load, promise)
    assert answer.settings
    costs = [s.figures.device_seconds_per_token for s in answer.settings]
    assert costs == sorted(costs)
    for s in answer.settings:
        assert kept(promise, s.figures, s.sure)
        plan = Planner(s.deployment, s.sure.efficiency)
        batch = s.figures.load.batch
        assert plan.memory.footprint(batch, 1280).fits
        more = plan.figures(Load(batch + 1, 1024, 256))
        assert not kept(promise, more, s.sure) or not plan.memory.footprint(batch + 1, 1280).fits


def test_limits_that_cannot_be_met_name_the_closest_setting() -> None:
    spec = find_model("llama-3.1-8b").spec
    l4 = hardware("l4")
    deployment = Deployment(spec, l4, default_precision(l4, "bfloat16", "bfloat16"))
    promise = Slo.parse("tpot=6ms")
    answer = search(deployment, Load(1, 128, 128), promise)
    assert not answer.settings
    assert answer.closest is not None
    assert not kept(promise, answer.closest.figures, answer.closest.sure)
    assert all(kept(promise, s.figures, s.sure) for s in answer.otherwise)
    assert "--hardware h100" in {s.changed for s in answer.otherwise}
    impossible = search(deployment, Load(1, 128, 128), Slo.parse("tpot=1us"))
    assert not impossible.otherwise
    assert impossible.closest is not None


def test_the_smallest_change_that_fits() -> None:
    assert smallest_fit(Deployment(find_model("llama-3.1-70b").spec, H100), Load(1, 3000, 1000)) == "--tp 2"
    assert (
        smallest_fit(Deployment(find_model("llama-3.1-405b").spec, H100), Load(1, 3000, 1000)) == "weights=fp8 --tp 8"
    )


@pytest.mark.parametrize(
    "text", ["", "ttft", "ttft=5", "ttft=-1ms", "tbt=5ms", "ttft=nanms", "tpot=ms", "ttft=1m", "ttft=1s,ttft=2s"]
)
def test_promises_that_are_none(text: str) -> None:
    with pytest.raises(RequestError, match="write NAME=TIME"):
        Slo.parse(text)


def test_promises() -> None:
    assert Slo.parse("ttft=0.2s,tpot=30000us,e2e=2s") == Slo.parse("ttft=200ms,tpot=30ms,e2e=2000ms")
