"""Swapping: a sequence whose pages were copied to the host and back gives the same answer."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from tempfile import TemporaryDirectory

import numpy as np
import pytest

from oracle.build import build
from oracle.case import VOCAB
from oracle.families import CASES
from ridgeline import LLM, SamplingParams
from ridgeline.engine import Engine
from ridgeline.runtime import arena
from ridgeline.runtime.generator import GenerationRequest
from ridgeline.runtime.runner import DeviceRunner
from ridgeline.sample.sampler import NoiseKey
from ridgeline.settings import EngineConfig, EngineOptions, resolve
from ridgeline.spec.groups import NULL_PAGE
from ridgeline.spec.request import RequestOutput

# every layer sees all tokens; some layers only see a window, which makes two groups of pages
FULL, WINDOWS = "llama_gqa", "gemma3"
LATENT = "deepseek_v3"  # one row per token for all heads
ALWAYS, NEVER = (1.0, 0.0), (0.0, 1.0)  # seconds per recomputed token, seconds per copied byte
RNG = np.random.default_rng(1)
PROMPTS = [RNG.integers(3, VOCAB, n).tolist() for n in (5, 30, 60, 43, 12)]
REQUESTS = [
    SamplingParams(max_tokens=24, temperature=t, seed=i, n=n, ignore_eos=True)
    for i, (t, n) in enumerate([(0.0, 1), (1.0, 1), (1.0, 4), (0.0, 2), (1.0, 1)])
]
Tokens = dict[tuple[int, int], list[int]]


@cache
def loaded(name: str) -> LLM:
    with TemporaryDirectory() as folder:
        build(CASES[name], folder)
        return LLM(folder, max_model_len=CASES[name].max_model_len, cache="off")


@cache
def baseline(name: str) -> Tokens:
    """Return the tokens of naive sampling."""
    outputs: list[RequestOutput] = loaded(name).generate(PROMPTS, REQUESTS)
    return {(i, c.index): c.token_ids for i, output in enumerate(outputs) for c in output.outputs}


def settings(name: str, **options: int) -> EngineConfig:
    """Return settings with pages for little more than the longest request, so that others are preempted, and enough
    host memory.
    """
    given = {"max_num_seqs": 6, "max_num_batched_tokens": 16, "block_size": 4, "swap_space_bytes": 1 << 22, **options}
    model, length = loaded(name).loaded, CASES[name].max_model_len
    chosen = resolve(
        model.spec, length, EngineOptions(**given), free_bytes=1 << 30, fixed_len=True,
        float_bytes=model.table.memory.float_bytes,
    )  # fmt: skip
    return replace(chosen, num_pages=tuple(g.most_pages(90) + 3 for g in chosen.groups))


def serve(name: str, config: EngineConfig) -> tuple[Tokens, Engine]:
    """Run all requests through one engine; page tables are checked at every step."""
    engine, out = Engine(loaded(name).loaded, config), {}
    for i, (prompt, params) in enumerate(zip(PROMPTS, REQUESTS, strict=True)):
        engine.add(i, GenerationRequest(prompt, params, tuple(NoiseKey(i, choice) for choice in range(params.n))))
    for _ in range(5000):
        if not len(engine):
            return out, engine
        for event in engine.step():
            assert event.error is None
            out.setdefault((event.request, event.choice), []).extend(event.tokens)
        engine.check()
    raise AssertionError("no progress")


@pytest.mark.parametrize("steps_in_flight", [1, 2])
@pytest.mark.parametrize("name", [FULL, WINDOWS, LATENT])
def test_swapped_sequences_give_equal_answers(name: str, steps_in_flight: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests are greedy and sampled, with one answer and several; whole pages are swapped one at a time."""
    monkeypatch.setattr(DeviceRunner, "preemption_rates", lambda self: ALWAYS)
    monkeypatch.setattr(arena, "MOVE_BYTES", 1)
    out, engine = serve(name, settings(name, steps_in_flight=steps_in_flight))
    assert out == baseline(name)
    stats = engine.stats()
    assert stats.preempted_swap > 0
    assert all(group.host_pages_used == 0 for group in stats.groups)


@pytest.mark.parametrize("name", [FULL, WINDOWS, LATENT])
def test_expensive_copies_prevent_swapping(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DeviceRunner, "preemption_rates", lambda self: NEVER)
    out, engine = serve(name, settings(name))
    assert out == baseline(name)
    stats = engine.stats()
    assert stats.preempted_swap == 0 < stats.preempted_recompute


@pytest.mark.parametrize("name", [FULL, WINDOWS])
def test_the_measured_cost(name: str) -> None:
    """The tokens are equal whether the measured rates of this machine lead to swapping or to recomputing."""
    out, engine = serve(name, settings(name))
    assert out == baseline(name)
    stats = engine.stats()
    assert stats.preempted_swap + stats.preempted_recompute > 0


def test_a_small_host_memory_swaps_some_and_recomputes_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DeviceRunner, "preemption_rates", lambda self: ALWAYS)
    config = settings(FULL)
    out, engine = serve(FULL, replace(config, num_host_pages=(18,)))
    assert out == baseline(FULL)
    stats = engine.stats()
    assert stats.preempted_swap > 0
    assert stats.preempted_recompute > 0


def test_nothing_is_measured_without_swap_space(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DeviceRunner, "preemption_rates", None)
    config = settings(FULL, swap_space_bytes=0)
    assert config.num_host_pages == (0,)
    out, engine = serve(FULL, config)
    assert out == baseline(FULL)
    assert engine.stats().preempted_recompute > 0


@pytest.mark.parametrize("name", [FULL, WINDOWS])
def test_measuring_disturbs_no_page(name: str) -> None:
    engine = Engine(loaded(name).loaded, settings(name))
    pages = engine._runner.arena._pages
    for i, group in enumerate(pages):
        group[:] = float(i + 1)
    assert min(engine._runner.preemption_rates()) > 0
    for i, group in enumerate(pages):
        assert (group[NULL_PAGE + 1 :] == i + 1).all()
