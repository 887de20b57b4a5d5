"""On a calibrated machine, a simulated step takes the time that the planner predicts, for any sequences."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import hypothesis
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_clock import ATTENTION, EXACT, KEPT, MODELS, NORM, RATES
from test_sim_cost import seconds
from typer.testing import CliRunner

from ridgeline.catalog.models import find_model
from ridgeline.cli.main import app
from ridgeline.cost.calibration import machine_of, save
from ridgeline.cost.operations import Slice
from ridgeline.cost.precision import Precision
from ridgeline.cost.shard import Scheme
from ridgeline.errors import RequestError
from ridgeline.measure.served import describe, predict
from ridgeline.plan.planner import Deployment, Planner
from ridgeline.sim import CalibratedCost, Request, RooflineCost, StepCost, Workload, cost_of, settings
from ridgeline.spec import GatedMLP, LatentAttention, Layer, Mamba2, ModelSpec, MoE, Rope
from ridgeline.spec.rates import Curve, Passes

LATENT = LatentAttention(4, 24, 16, 8, 16, 0.2, NORM, rope=Rope(8))
HYBRID = (
    Layer(ATTENTION, GatedMLP(128), NORM), Layer(Mamba2(2, 64, 16, 1, 4, NORM), None, NORM),
    Layer(replace(ATTENTION, window=100), MoE(8, 2, 64), NORM), Layer(LATENT, GatedMLP(128), NORM),
)  # fmt: skip
ALL = MODELS | {
    "latent": ModelSpec("x", 1000, 64, 16384, (Layer(LATENT, GatedMLP(128), NORM),) * 3, NORM),
    "hybrid": ModelSpec("x", 1000, 64, 16384, HYBRID, NORM),
}
PUBLISHED = ("mistralai/Mixtral-8x7B-v0.1", "deepseek-ai/DeepSeek-V2-Lite", "ai21labs/Jamba-v0.1")
MORE_TERMS = {"state from memory": 3e-9, "latent layer": 2e-5, "latent token": 4e-7}
# From memory, 16 rows take less time than from caches; an operation as a whole is never faster than in caches.
ODD = Passes(Curve((1.0, 16.0, 512.0), (4e-11, 3e-11, 1e-11)), Curve((1.0, 16.0, 512.0), (9e-11, 1e-11, 2e-11)))
MACHINES = {
    "measured": machine_of(KEPT),
    "odd": replace(
        machine_of(KEPT),
        rates=replace(RATES, terms={**RATES.terms, **MORE_TERMS}, products={"float32": ODD}, attention={"float32": ODD},
                      far=Curve((1e4, 1e6, 4e6), (1e-3, 0.4, 1.0))),
    ),
}  # fmt: skip
DECODE = st.builds(lambda before: Slice(1, 1, 1 + before), st.integers(0, 9000))
CHUNK = st.builds(
    lambda tokens, before, sampled: Slice(1, tokens, tokens + before, sampled),
    st.integers(1, 300), st.integers(0, 9000), st.integers(0, 1),
)  # fmt: skip
BATCHES = st.one_of(st.lists(DECODE, min_size=1, max_size=40), st.lists(DECODE | CHUNK, min_size=1, max_size=12))


def deployment(model: str, machine: str = "odd", precision: Precision = EXACT) -> Deployment:
    return Deployment(ALL[model], MACHINES[machine], precision)


CASES = [("dense", "measured"), *((model, "odd") for model in ALL)]
COSTS = {case: cost_of(deployment(*case)) for case in CASES}


@pytest.mark.parametrize(("model", "machine"), CASES)
@hypothesis.settings(max_examples=30, deadline=None)
@given(batch=BATCHES)
def test_a_step_takes_the_planned_time(model: str, machine: str, batch: list[Slice]) -> None:
    wanted = Planner(deployment(model, machine)).step(batch).seconds
    assert seconds(COSTS[model, machine], batch) == pytest.approx(wanted, rel=1e-9)


@pytest.mark.parametrize("model", PUBLISHED)
def test_published_models_in_narrow_types(model: str) -> None:
    found = Deployment(find_model(model).spec, MACHINES["odd"], Precision("int4", "int8", "float32", None, "int8"))
    planner, cost = Planner(found), cost_of(found)
    for batch in ([Slice(1, 1, 100)] * 32, [Slice(1, 1, 7), Slice(1, 512, 4096, 0), Slice(1, 100, 100)]):
        assert seconds(cost, batch) == pytest.approx(planner.step(batch).seconds, rel=1e-9)


@pytest.mark.parametrize("model", ALL)
def test_many_steps_at_once_are_the_same_numbers(model: str) -> None:
    """The results are equal to the bit, while the share that comes from memory grows."""
    cost = COSTS[model, "odd"]
    contexts = np.array([[3], [700], [31]]) + 500 * np.arange(9)  # [sequences, steps]
    sums = np.array([[cost.of(1, int(c)) for c in row] for row in contexts]).sum(axis=0).T
    together = cost.seconds(3, 3, sums)
    assert together.tolist() == [cost.seconds(3, 3, column) for column in sums.T.tolist()]
    assert together.shape == (9,) and (np.diff(together) >= 0).all()


def test_which_cost_is_taken() -> None:
    found = deployment("dense")
    assert type(cost_of(found)) is CalibratedCost
    roof = replace(found, hardware=replace(found.hardware, rates=None))
    assert type(cost_of(roof)) is RooflineCost
    cost: StepCost = cost_of(found)
    assert seconds(cost, [Slice(1, 1, 9)]) > seconds(cost_of(roof), [Slice(1, 1, 9)])
    with pytest.raises(RequestError, match=r"tp 2, ep 1, pp 1: this machine .* one device; set all three to 1"):
        cost_of(replace(found, scheme=Scheme(tp=2)))


# ---- the settings of a running server -----------------------------------------------------------------------


WORKLOAD = Workload([Request(i * 10**6, 40 + i, 30) for i in range(12)])


def described(found: Deployment) -> dict[str, object]:
    chosen = settings(found, max_model_len=512, max_num_seqs=8)
    names = ("num_pages", "max_num_seqs", "max_num_batched_tokens", "max_model_len")
    back: dict[str, object] = json.loads(json.dumps(describe(found, {name: getattr(chosen, name) for name in names})))
    return back


def test_a_server_is_predicted_with_its_own_rates() -> None:
    """After a round trip through JSON, the times equal those of the deployment itself, and differ from the roofline."""
    found = deployment("dense", "measured")
    report, times = predict(described(found), WORKLOAD, None, 0)
    assert (
        times
        == "steps as its engine is expected to take them (measured by ridgeline calibrate on 2026-11-22, 2 threads)"
    )
    faster = replace(found, hardware=replace(found.hardware, rates=None))
    roof, said = predict(described(faster), WORKLOAD, None, 0)
    assert "at the roof of the server's machine (measured by" in said
    assert report.requests == roof.requests == 12 and report.duration_s > 1.5 * roof.duration_s
    single = predict(described(found), Workload([Request(0, 1, 2)]), None, 0)[0]
    assert single.tpot_s is not None
    assert single.tpot_s.mean == pytest.approx(Planner(found).decode(1, 2).seconds, abs=2e-9)


@pytest.mark.parametrize("rates", [5, {}, {"threads": 2}, {"threads": 1, "isa": "x", "read": [1]}])
def test_invalid_rates_are_an_error(rates: object) -> None:
    value = described(deployment("dense"))
    value["machine"] = {**value["machine"], "rates": rates}  # type: ignore[dict-item]
    with pytest.raises(RequestError, match="are both of one version"):
        predict(value, WORKLOAD, None, 0)


# ---- the command line ---------------------------------------------------------------------------------------


def simulated(*more: str) -> str:
    result = CliRunner().invoke(
        app,
        ["simulate", "Qwen2.5-0.5B", "--num-requests", "5", "--input-len", "30", "--output-len", "4", *more],
        catch_exceptions=False,
    )
    assert result.exit_code == 0, result.output
    return result.output


def test_it_says_which_step_times_it_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert "times are lower bounds by the roofline" in simulated()
    assert "not calibrated" in simulated("--hardware", "local")
    save(KEPT)
    assert "calibrated on 2026-11-22 while other programs used 0% of the machine: times" in simulated(
        "--hardware", "local"
    )
    found = json.loads(simulated("--hardware", "local", "--json", "--arrivals", "closed:1", "--length-cv", "0"))
    assert found["times"].startswith("calibrated on 2026-11-22")
    path = tmp_path / "steps.json"
    path.write_text('{"tokens": [1], "step_s": [0.5]}')
    shown = "".join(simulated("--hardware", "local", "--step-times", str(path)).split())  # at any width of the table
    assert f"steptimescomefrom{path}" in shown
