"""One loop over two runners: the device in its thread, and the simulator's clock."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest

from cpu.test_drafts import NEW_TOKENS, PROMPTS, loaded, plain, requests, settings
from ridgeline.engine import Engine
from ridgeline.engine.engine import RequestLoop
from ridgeline.runtime.generator import GenerationRequest
from ridgeline.runtime.runner import DeviceRunner
from ridgeline.sample.sampler import NoiseKey
from ridgeline.sim import LinearCost, Request, Settings, Workload, simulate
from ridgeline.sim.costs import CostTable
from ridgeline.sim.runner import ClockRunner
from ridgeline.sim.workload import SECOND
from ridgeline.spec.request import SamplingParams

EDITED = {"temperature": 1.0, "n": 2, "repetition_penalty": 1.3}


@pytest.fixture
def threaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the thread run steps of any size."""
    monkeypatch.setattr(DeviceRunner, "thread_works", 1)


def serve(engine: RequestLoop[Any], **params: Any) -> dict[tuple[int, int], list[int]]:
    out: dict[tuple[int, int], list[int]] = {}
    for i, request in enumerate(requests(**params)):
        engine.add(i, request)
    while len(engine):
        for event in engine.step():
            assert event.error is None
            out.setdefault((event.request, event.choice), []).extend(event.tokens)
        engine.check()
    return out


@pytest.mark.parametrize("params", [{}, {"temperature": 1.0, "logprobs": 2, "prompt_logprobs": 1}, EDITED])
@pytest.mark.parametrize("tight", [False, True])
def test_steps_in_a_thread_change_nothing(params: dict[str, Any], tight: bool, threaded: None) -> None:
    """The device samples some rows, the host samples others, and sequences are preempted meanwhile."""
    name = "hybrid"
    config = settings(name, 0, steps_in_flight=2, max_num_batched_tokens=24)
    if tight:
        config = replace(config, num_pages=tuple(g.most_pages(61 + NEW_TOKENS) + 3 for g in config.groups))
    engine = Engine(loaded(name), config)
    assert serve(engine, **params) == plain(name, **params)
    assert bool(engine.stats().preempted_recompute) == tight


def test_the_host_works_while_the_device_does(threaded: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Step 3 runs on the device when the engine returns the tokens of step 2."""
    engine = Engine(loaded("attention"), settings("attention", 0, steps_in_flight=2))
    run, let_go, begun = DeviceRunner._run, threading.Event(), threading.Event()

    def slow(self: DeviceRunner, plan: Any, sampling: Any) -> Any:
        if plan.step == 3:
            begun.set()
            assert let_go.wait(60)
        return run(self, plan, sampling)

    monkeypatch.setattr(DeviceRunner, "_run", slow)
    engine.add(0, GenerationRequest(PROMPTS[1], SamplingParams(max_tokens=4, temperature=0), (NoiseKey(0, 0),)))
    assert [engine.step(), len(engine.step()), len(engine.step())] == [[], 1, 1]
    assert begun.wait(60) and not let_go.is_set()
    let_go.set()
    while len(engine):
        engine.step()


def test_an_exception_in_the_thread_is_raised_and_the_engine_can_be_reset(
    threaded: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(loaded("attention"), settings("attention", 0, steps_in_flight=2))
    run = DeviceRunner._run

    def broken(self: DeviceRunner, plan: Any, sampling: Any) -> Any:
        if plan.step == 5:
            raise MemoryError("the device is full")
        return run(self, plan, sampling)

    with monkeypatch.context() as patch:
        patch.setattr(DeviceRunner, "_run", broken)
        with pytest.raises(MemoryError, match="the device is full"):
            serve(engine)
        engine.reset()
    assert not len(engine) and serve(engine) == plain("attention")


@pytest.mark.parametrize("depth", [1, 2])
def test_the_engine_runs_on_the_simulators_clock(depth: int) -> None:
    """The engine's requests take the same steps and times as in the simulator; two steps in flight change no time."""
    config = settings("attention", 0, max_num_batched_tokens=24, steps_in_flight=depth)
    cost = LinearCost((24,), (0.01,))
    clock = ClockRunner(CostTable(cost))
    engine = RequestLoop(clock, config, 97, frozenset())
    out = serve(engine)
    assert out == {(i, 0): [0] * NEW_TOKENS for i in range(len(PROMPTS))}
    workload = Workload([Request(0, len(prompt), NEW_TOKENS) for prompt in PROMPTS])
    config_of = Settings(config.groups, config.num_pages, config.max_num_seqs, config.max_num_batched_tokens, 256)
    found = simulate(workload, config_of, cost, every_step=True).report
    assert clock.now_ns / SECOND == pytest.approx(found.duration_s)
    assert engine.stats().queried_tokens == sum(map(len, PROMPTS))
