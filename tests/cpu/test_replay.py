"""A workload in the engine and in the simulator: equal columns, and equal figures if they do not depend on time."""

from __future__ import annotations

import json

import numpy as np
import pytest

from ridgeline import LLM
from ridgeline.measure.replay import prompt_ids, replay
from ridgeline.settings import EngineOptions
from ridgeline.sim import LinearCost, Request, Settings, Workload, simulate


@pytest.fixture(scope="module")
def llm() -> LLM:
    options = EngineOptions(max_num_seqs=4, max_num_batched_tokens=64)
    return LLM("pocket", skip_tokenizer_init=True, max_model_len=256, engine=options)


def test_the_same_columns(llm: LLM) -> None:
    """All requests are there from the start, so that chance has no effect: the steps are equal."""
    blocks = (3, 4, 5)
    requests = [Request(0, 60 + n, 5 + n, blocks if n % 2 else (), 16) for n in range(9)]
    config = llm.config
    assert config is not None
    settings = Settings(config.groups, config.num_pages, 4, 64, 256)
    simulated = simulate(Workload(requests), settings, LinearCost((1,), (0.01,)), every_step=True).report
    measured = replay(llm, Workload(requests)).report
    one, other = (json.loads(json.dumps(r.to_json())) for r in (simulated, measured))
    assert one.keys() == other.keys()
    same = ("requests", "refused", "prompt_tokens", "output_tokens", "steps", "hit_rate", "preemptions", "replicas")
    assert {name: one[name] for name in same} == {name: other[name] for name in same}
    assert simulated.hit_rate > 0
    assert measured.ttft_s and measured.tpot_s and 0 < measured.ttft_s.p50 < measured.duration_s


def test_requests_arrive_at_their_times_and_clients_wait(llm: LLM) -> None:
    found = replay(llm, Workload([Request(0, 4, 2), Request(200_000_000, 4, 2)])).report
    assert found.duration_s > 0.2 and found.utilization < 1
    closed = replay(llm, Workload([Request(0, 4, 3)] * 4, clients=2, think_ns=10_000_000)).report
    assert closed.requests == 4 and closed.mean_batch <= 2
    assert replay(llm, Workload([Request(0, 4, 2), Request(0, 400, 2)])).report.refused == 1


def test_equal_blocks_are_equal_tokens() -> None:
    a, b = (prompt_ids(Request(0, 100, 1, blocks, 32), n, 500, 7) for n, blocks in enumerate(((1, 2), (1, 3))))
    assert a[:32] == b[:32] and len(a) == 100
    assert a[32:64] != b[32:64] and a[64:] != b[64:]
    assert max(np.max(a), np.max(b)) < 500
