"""Drafts in the engine: they never change an answer, and no state is stored for each draft."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import numpy as np
import pytest

from oracle.mixers import CONVOLUTION, FULL, LATENT, LOCAL, MAMBA, MAMBA2, NORM, TAYLOR, UNIT, VOCAB, WIDTH
from ridgeline import LLM, SamplingParams
from ridgeline.engine import Engine
from ridgeline.errors import RequestError
from ridgeline.ops.api import Memory
from ridgeline.propose import Drafts
from ridgeline.runtime import layout, step
from ridgeline.runtime.drafts import DraftInputs
from ridgeline.runtime.generator import GenerationRequest
from ridgeline.runtime.layout import Slices
from ridgeline.runtime.load import LoadedModel
from ridgeline.runtime.naive import NaiveGenerator
from ridgeline.sample.sampler import NoiseKey
from ridgeline.settings import EngineConfig, EngineOptions, resolve
from ridgeline.spec import (
    GatedMLP,
    Layer,
    ModelSpec,
    TokenMixer,
    to_json,
)

STACKS: dict[str, tuple[TokenMixer, ...]] = {
    "attention": (FULL, LOCAL),
    "mamba": (MAMBA, MAMBA),
    "mamba-2": (MAMBA2, MAMBA2),
    "short convolution": (CONVOLUTION, CONVOLUTION),
    "taylor": (TAYLOR, TAYLOR),
    "hybrid": (FULL, MAMBA, LOCAL, MAMBA2, CONVOLUTION, TAYLOR),
    "latents": (LATENT, MAMBA2),
    "gated unit": (UNIT, UNIT),
}
RNG = np.random.default_rng(0)
PROMPTS = [RNG.integers(3, VOCAB, n).tolist() for n in (1, 12, 33, 40, 61)]
NEW_TOKENS = 24
DRAFTS = 5
Answers = dict[tuple[int, int], list[int]]
# (request, choice, tokens of the answer so far) -> drafts
Proposer = Callable[[int, int, list[int]], Sequence[int] | Drafts]


@cache
def loaded(name: str) -> LoadedModel:
    with TemporaryDirectory() as folder:
        layers = tuple(Layer(mixer, GatedMLP(48), NORM) for mixer in STACKS[name])
        config = {"model_type": "ridgeline", "spec": to_json(ModelSpec("drafts", VOCAB, WIDTH, 256, layers, NORM))}
        (Path(folder) / "config.json").write_text(json.dumps(config))
        return LLM(folder, load_format="dummy", skip_tokenizer_init=True, cache="off").loaded


def requests(**params: Any) -> list[GenerationRequest]:
    sampling = SamplingParams(**{"max_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True, **params})
    noise = range(sampling.n)
    return [GenerationRequest(p, sampling, tuple(NoiseKey(i, j) for j in noise)) for i, p in enumerate(PROMPTS)]


@cache
def plain(name: str, **params: Any) -> Answers:
    """Return the answers of naive sampling."""
    out: Answers = {}
    naive = NaiveGenerator(loaded(name))
    for i, request in enumerate(requests(**params)):
        naive.add(i, request)
        while len(naive):
            for event in naive.step():
                out.setdefault((i, event.choice), []).extend(event.tokens)
    return out


def settings(name: str, drafts: int = DRAFTS, **options: int) -> EngineConfig:
    usual = {"max_num_seqs": 8, "block_size": 4, "state_snapshot_tokens": 16, "num_speculative_tokens": drafts}
    return resolve(loaded(name).spec, 256, EngineOptions(**usual | options), free_bytes=1 << 30, fixed_len=True)


def serve(engine: Engine, propose: Proposer, **params: Any) -> tuple[Answers, int]:
    """Run all requests at once and return the answers and the number of steps. Page tables are
    checked at every step.
    """
    out: Answers = {}
    steps = 0
    for i, request in enumerate(requests(**params)):
        engine.add(i, request)
    while len(engine):
        for event in engine.step():
            assert event.error is None
            out.setdefault((event.request, event.choice), []).extend(event.tokens)
        engine.check()
        for (request, choice), tokens in out.items():
            engine.propose(request, choice, propose(request, choice, tokens))
        steps += 1
        assert steps < 3000, "no progress"
    return out, steps


def right(answers: Answers, wrong: float = 0.0) -> Proposer:
    """Return a proposer that proposes the answer's next tokens, a share of them wrong."""
    rng = np.random.default_rng(1)

    def propose(request: int, choice: int, tokens: Sequence[int]) -> Sequence[int]:
        drafts = answers[request, choice][len(tokens) :][:DRAFTS]
        return [(t + 1) % VOCAB if rng.random() < wrong else t for t in drafts]

    return propose


def anything(request: int, choice: int, tokens: Sequence[int]) -> Sequence[int]:
    return np.random.default_rng(len(tokens)).integers(0, VOCAB, len(tokens) % (DRAFTS + 3)).tolist()


def n_gram(request: int, choice: int, tokens: Sequence[int]) -> Sequence[int]:
    """Propose the tokens that followed an earlier occurrence of the last token."""
    known = [*PROMPTS[request], *tokens]
    at = next((i for i in range(len(known) - 2, -1, -1) if known[i] == known[-1]), len(known))
    return known[at + 1 : at + 1 + DRAFTS]


@pytest.mark.parametrize("kind", ["right", "half right", "anything", "n-gram"])
@pytest.mark.parametrize("name", STACKS)
def test_drafts_change_nothing(name: str, kind: str) -> None:
    wanted = plain(name)
    propose = {"right": right(wanted), "half right": right(wanted, 0.4), "anything": anything, "n-gram": n_gram}[kind]
    engine = Engine(loaded(name), settings(name))
    out, steps = serve(engine, propose)
    assert out == wanted
    if kind == "right":  # the longest prompt has 61 tokens, and its chunks end on state snapshots
        assert steps <= 3 + -(-NEW_TOKENS // (DRAFTS + 1))
    for group, stats in zip(engine.config.groups, engine.stats().groups, strict=True):
        if group.snapshot:  # no pages for each draft: only the state that a step reads and the one that it writes
            assert stats.peak_pages <= 2 * len(PROMPTS)
    held = sum(4 * prod(x.shape) for kept in engine._runner._inputs._kept.values() for x in kept)
    # no more than the plan counts
    assert held <= engine.config.workspace_bytes - settings(name, drafts=0).workspace_bytes


SAMPLED = {"temperature": 1.0, "n": 3, "top_p": 0.9, "repetition_penalty": 1.3, "frequency_penalty": 0.5}


@pytest.mark.parametrize("name", ["attention", "hybrid"])
def test_drawn_answers_stay_as_they_are_too(name: str) -> None:
    """The noise depends only on the position in the answer, so a drawn token either is the draft or is not."""
    wanted = plain(name, **SAMPLED)
    out, steps = serve(Engine(loaded(name), settings(name, max_num_seqs=16)), right(wanted, 0.2), **SAMPLED)
    assert out == wanted
    assert steps < NEW_TOKENS


@pytest.mark.parametrize("how", ["recompute", "swap"])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("name", ["mamba", "hybrid"])
def test_drafts_of_preempted_sequences(name: str, depth: int, how: Literal["recompute", "swap"]) -> None:
    wanted = plain(name)
    config = settings(name, steps_in_flight=depth, max_num_batched_tokens=24, state_snapshot_tokens=4)
    few = tuple(g.most_pages(61 + NEW_TOKENS) + 3 for g in config.groups)
    host = tuple(4 * n if how == "swap" else 0 for n in few)
    engine = Engine(loaded(name), replace(config, num_pages=few, num_host_pages=host))
    engine._scheduler._swap_cost = (lambda num_tokens, num_bytes: how) if how == "swap" else None
    out, _ = serve(engine, right(wanted, 0.3))
    stats = engine.stats()
    assert out == wanted
    assert stats.preempted_swap if how == "swap" else stats.preempted_recompute


def test_stops_among_drafts() -> None:
    """Drafts that were accepted after a stop are not part of the answer."""
    name = "hybrid"
    wanted = plain(name)
    stops = {i: wanted[i, 0][7] for i in range(len(PROMPTS))}
    engine = Engine(loaded(name), settings(name))
    params = SamplingParams(max_tokens=NEW_TOKENS, temperature=0, ignore_eos=True)
    found: dict[int, list[int]] = {}
    for i, prompt in enumerate(PROMPTS):
        stopping = replace(params, stop_token_ids=(stops[i],))
        engine.add(i, GenerationRequest(prompt, stopping, (NoiseKey(i, 0),)))
    while len(engine):
        for event in engine.step():
            found.setdefault(event.request, []).extend(event.tokens)
            if event.finish_reason:
                assert (event.finish_reason, event.stop_reason) == ("stop", stops[event.request])
        engine.check()
        for i, tokens in found.items():
            engine.propose(i, 0, wanted[i, 0][len(tokens) :])
    assert found == {i: wanted[i, 0][: wanted[i, 0].index(stops[i]) + 1] for i in found}


def test_logprobs_of_drafts_are_those_of_tokens_one_by_one() -> None:
    """The test finds a state that is slightly wrong, even if every token stays equal."""
    for name in STACKS:
        answers = plain(name)
        found = []
        for proposer in (right(answers, 0.3), lambda *_: ()):
            engine = Engine(loaded(name), settings(name))
            values: dict[int, list[float]] = {}
            for i, request in enumerate(requests(logprobs=0)):
                engine.add(i, request)
            while len(engine):
                for event in engine.step():
                    values.setdefault(event.request, []).extend(e.logprob for e in event.logprobs)
                    tokens = answers[event.request, 0][: len(values[event.request])]
                    engine.propose(event.request, 0, proposer(event.request, 0, tokens))
            found.append([values[i] for i in range(len(PROMPTS))])
        np.testing.assert_allclose(*found, atol=2e-5)


# ---- deliberate bugs ------------------------------------------------------------------------------------------------


def nothing_replayed(patch: pytest.MonkeyPatch) -> None:
    read = DraftInputs.read
    patch.setattr(DraftInputs, "read", lambda *args: [0 * kept for kept in read(*args)])


def rejected_drafts_stay_in_the_state(patch: pytest.MonkeyPatch) -> None:
    build = layout.build_segments

    def segments(slices: Slices, memory: Memory) -> Any:
        none = np.zeros_like(slices.drafts)
        return build(replace(slices, drafts=none), memory)._replace(keep=build(slices, memory).keep)

    patch.setattr(step, "build_segments", segments)


@pytest.mark.parametrize("bug", [nothing_replayed, rejected_drafts_stay_in_the_state])
@pytest.mark.parametrize("name", ["mamba", "mamba-2", "short convolution", "taylor", "gated unit", "hybrid"])
def test_caught(name: str, bug: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = plain(name)
    bug(monkeypatch)
    engine = Engine(loaded(name), settings(name))
    engine._runner.graphs._passes.refusal = "test_graphs.py has the bugs of recorded steps"
    assert serve(engine, right(wanted, 0.4))[0] != wanted


# ---- valid and invalid drafts ---------------------------------------------------------------------------------------


def test_invalid_tokens_are_refused() -> None:
    engine = Engine(loaded("mamba"), settings("mamba"))
    engine.add(0, requests()[0])
    with pytest.raises(RequestError, match="draft token 97 is not among the model's 97"):
        engine.propose(0, 0, [5, VOCAB])
    engine.propose(7, 0, [5])  # the request has ended, or never existed
    engine.abort(0)
    engine.propose(0, 0, [5])


def test_drafts_without_free_pages_are_not_run() -> None:
    config = settings("mamba", drafts=0)
    out, steps = serve(Engine(loaded("mamba"), config), right(plain("mamba")))
    assert out == plain("mamba")
    assert steps >= NEW_TOKENS
    assert config.workspace_bytes < settings("mamba").workspace_bytes
