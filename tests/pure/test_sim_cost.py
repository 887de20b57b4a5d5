"""The cost of a step in a simulation equals the planner's prediction."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from ridgeline.catalog.machines import hardware
from ridgeline.catalog.models import find_model
from ridgeline.cost.efficiency import efficiency_of, expected_step
from ridgeline.cost.operations import Forward, Slice
from ridgeline.cost.roofline import time_step
from ridgeline.cost.shard import Scheme, device_operations
from ridgeline.errors import RequestError
from ridgeline.plan.expected import Sureness
from ridgeline.plan.planner import Deployment
from ridgeline.sim import LinearCost, RooflineCost, StepCost, cost_of, settings

MODELS = (
    "meta-llama/Meta-Llama-3-8B", "mistralai/Mistral-7B-v0.1", "google/gemma-2-2b", "mistralai/Mixtral-8x7B-v0.1",
    "deepseek-ai/DeepSeek-V2-Lite", "state-spaces/mamba-2.8b-hf", "ai21labs/Jamba-v0.1",
)  # fmt: skip


def deployment(model: str, tp: int = 1) -> Deployment:
    machine = replace(hardware("h100"), op_overhead_s=3e-6, step_overhead_s=1e-4)
    return Deployment(find_model(model).spec, machine, scheme=Scheme(tp=tp))


def seconds(cost: StepCost, batch: list[Slice]) -> float:
    sums = [sum(column) for column in zip(*(cost.of(s.tokens, s.context) for s in batch), strict=True)]
    found: float = cost.seconds(sum(s.tokens for s in batch), sum(s.sampled for s in batch), sums)
    return found


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("model", MODELS)
def test_a_step_takes_the_planned_time(model: str, tp: int) -> None:
    rng = random.Random(model)
    found = deployment(model, tp)
    cost, forward = RooflineCost(found), Forward(found.spec, found.precision)
    for _ in range(4):
        batch = []
        for _ in range(rng.randint(1, 12)):
            tokens = rng.choice([1, 1, 1, rng.randint(1, 300)])
            batch.append(Slice(1, tokens, tokens + rng.randint(0, 9000), rng.randint(0, 1)))
        wanted = time_step(device_operations(forward, batch, found.scheme), found.hardware).seconds
        # shares are rounded to whole bytes
        assert seconds(cost, batch) == pytest.approx(wanted, rel=1e-6 if tp > 1 else 1e-12)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("model", MODELS)
def test_a_step_takes_the_expected_time(model: str, tp: int) -> None:
    """With the time of each new request, which only its first tokens take; a margin never beats the roof."""
    rng = random.Random(model)
    found = replace(deployment(model, tp), hardware=hardware("h100"))
    known = efficiency_of(found.hardware)
    assert known is not None
    cost, forward = RooflineCost(found, efficiency=known), Forward(found.spec, found.precision)
    for _ in range(4):
        batch = [
            Slice(1, n := rng.choice([1, 1, 200]), n + rng.choice([0, 1, 3000]), 1) for _ in range(rng.randint(1, 9))
        ]
        ops = device_operations(forward, batch, found.scheme)
        new = sum(s.tokens == s.context for s in batch)
        wanted = expected_step(ops, batch, found.hardware, known).seconds + new * known.values["request_s"]
        assert seconds(cost, batch) == pytest.approx(wanted, rel=1e-6 if tp > 1 else 1e-12)
        roof = time_step(ops, found.hardware.roof()).seconds
        for factor in (0.01, 0.9, 3.0):
            sure = cost_of(found, Sureness(known, factor, factor))
            assert seconds(sure, batch) == pytest.approx(max(factor * wanted, roof), rel=1e-6 if tp > 1 else 1e-12)


def test_many_steps_at_once_are_the_same_numbers() -> None:
    """An array of sums gives the same bits as each sum alone."""
    h100 = replace(deployment(MODELS[2]), hardware=hardware("h100"))
    expected = cost_of(h100, Sureness(efficiency_of(hardware("h100")), 0.8, 0.8))
    for cost in (RooflineCost(deployment(MODELS[2])), LinearCost((1, 64), (1e-3, 3e-3), 1.1e-7), expected):
        contexts = [700, 5000, 31]
        many = np.array([[[c + k for k in range(9)] for c in contexts]])
        # numbers [steps, sequences, numbers]
        numbers = np.array([[cost.of(1, int(c)) for c in row] for row in many[0].T])
        together = cost.seconds(3, 3, numbers.sum(axis=1).T)
        alone = [cost.seconds(3, 3, [int(x) for x in row]) for row in numbers.sum(axis=1)]
        assert together.tolist() == alone


def test_measured_step_times() -> None:
    cost = LinearCost((1, 100), (0.001, 0.002), 1e-6)
    assert cost.seconds(1, 1, [0]) == pytest.approx(0.001)
    assert cost.seconds(100, 1, [1000]) == pytest.approx(0.003)
    assert cost.seconds(199, 1, [0]) == pytest.approx(0.003)  # the last segment is extrapolated
    with pytest.raises(RequestError, match="ascending"):
        LinearCost((2, 1), (1.0, 1.0))


def test_settings_fill_the_memory() -> None:
    found = settings(deployment(MODELS[0]))
    taken = found.state_bytes + 2 * find_model(MODELS[0]).spec.num_params()
    assert 0.7 < taken / 80e9 < 0.95
    with pytest.raises(RequestError, match="narrower weights"):
        settings(deployment("meta-llama/Llama-3.1-70B"))


def test_features_that_are_not_simulated_are_refused() -> None:
    with pytest.raises(RequestError, match="set both to 1"):
        RooflineCost(replace(deployment(MODELS[0]), scheme=Scheme(pp=2)))
