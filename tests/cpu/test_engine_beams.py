"""Beam search in the engine: transformers' answers in any batch, with too few pages and rows for all beams."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch

from oracle.build import build
from oracle.case import VOCAB
from oracle.families import CASES
from ridgeline import LLM, BeamSearchParams, SamplingParams
from ridgeline.engine import Engine, Session
from ridgeline.errors import RequestError
from ridgeline.runtime.generator import Event, GenerationRequest
from ridgeline.sample.sampler import NoiseKey
from ridgeline.settings import EngineOptions

RNG = np.random.default_rng(7)
PROMPTS = [RNG.integers(3, VOCAB, n).tolist() for n in (1, 9, 30)]
PARAMS = [
    BeamSearchParams(beam_width=2, max_tokens=12, ignore_eos=True),
    BeamSearchParams(beam_width=5, n=3, max_tokens=9, length_penalty=0.6, early_stopping=True),
    BeamSearchParams(beam_width=3, max_tokens=15, length_penalty=2.0, early_stopping="never"),
]
NAMES = ["llama_gqa", "gemma3", "qwen2_window", "mixtral", "gpt2", "deepseek_v2"]


@cache
def peers(name: str) -> tuple[Any, LLM]:
    """Return transformers' model and ours, with three end tokens that do occur."""
    with TemporaryDirectory() as folder:
        model = build(CASES[name], folder)
        llm = LLM(folder, max_model_len=CASES[name].max_model_len, engine=EngineOptions(block_size=4))
    ends = llm.generate([PROMPTS[1]], SamplingParams(max_tokens=3, n=1, seed=5, ignore_eos=True))[0].outputs[0]
    object.__setattr__(llm.loaded, "eos_token_ids", frozenset(ends.token_ids))
    llm.session = Session(Engine(llm.loaded, config(llm)), None)
    return model, llm


def config(llm: LLM, **changes: Any) -> Any:
    assert llm.config is not None
    return replace(llm.config, **changes)


@cache
def wanted(name: str) -> list[tuple[list[list[int]], list[float]]]:
    """Return answers and scores of transformers."""
    model, llm = peers(name)
    out = []
    for prompt, p in zip(PROMPTS, PARAMS, strict=True):
        eos = None if p.ignore_eos else sorted(llm.loaded.eos_token_ids)
        model.generation_config.eos_token_id = eos
        with torch.no_grad():
            found = model.generate(
                torch.tensor([prompt]), num_beams=p.beam_width, num_return_sequences=p.answers, do_sample=False,
                length_penalty=p.length_penalty, early_stopping=p.early_stopping, max_new_tokens=p.max_tokens,
                pad_token_id=0, eos_token_id=eos, return_dict_in_generate=True, output_scores=True,
            )  # fmt: skip
        lengths = (found.beam_indices >= 0).sum(dim=1).tolist()
        rows = found.sequences[:, len(prompt) :].tolist()
        out.append(([row[:n] for row, n in zip(rows, lengths, strict=True)], found.sequences_scores.tolist()))
    return out


@pytest.mark.parametrize("name", NAMES)
def test_answers_and_scores_are_those_of_transformers(name: str) -> None:
    _, llm = peers(name)
    for output, (tokens, scores) in zip(llm.generate(PROMPTS, PARAMS), wanted(name), strict=True):
        assert [a.token_ids for a in output.outputs] == tokens
        assert [a.score for a in output.outputs] == pytest.approx(scores, abs=1e-4)
        for a in output.outputs:
            ended = a.token_ids[-1] in llm.loaded.eos_token_ids and output.prompt_token_ids != PROMPTS[0]
            assert a.finish_reason == ("stop" if ended else "length")
    assert output.to_json()["choices"][0]["score"] == output.outputs[0].score
    stats = llm.stats()
    assert stats is not None
    assert (stats.running, stats.waiting, stats.groups[0].used_pages) == (0, 0, 0)


SETTINGS: dict[str, dict[str, Any]] = {
    "plenty": {},
    "two steps in flight": {"steps_in_flight": 2},
    "small chunks": {"max_num_batched_tokens": 3},
    "one row": {"max_num_seqs": 1},
    "fewer rows than beams": {"max_num_seqs": 4, "steps_in_flight": 2},
    "few pages": {"max_num_seqs": 8, "steps_in_flight": 2, "pages": 2},
    "few pages and rows": {"max_num_seqs": 3, "max_num_batched_tokens": 5, "pages": 1},
}


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", ["gemma3", "llama_gqa"])
def test_batch_pages_and_rows_change_nothing(name: str, setting: str) -> None:
    """Each search among sampled requests gives the answer that it gives alone."""
    _, llm = peers(name)
    changes = dict(SETTINGS[setting])
    if (spare := changes.pop("pages", None)) is not None:
        assert llm.config is not None
        changes["num_pages"] = tuple(g.most_pages(46) + 1 + spare for g in llm.config.groups)
    engine = Engine(llm.loaded, config(llm, **changes))
    sampled = [SamplingParams(max_tokens=6 + i, seed=i, n=1 + i % 3, ignore_eos=True) for i in range(5)]
    alone = [llm.generate([PROMPTS[i % 3]], p)[0] for i, p in enumerate(sampled)]
    arrivals: dict[int, list[tuple[int, GenerationRequest]]] = {}
    for i, (prompt, p) in enumerate(zip(PROMPTS, PARAMS, strict=True)):
        arrivals.setdefault(2 * i, []).append((i, GenerationRequest(prompt, p, ())))
    for i, q in enumerate(sampled):
        noise = tuple(NoiseKey(i, choice) for choice in range(q.n))
        arrivals.setdefault(i, []).append((10 + i, GenerationRequest(PROMPTS[i % 3], q, noise)))
    events = run(engine, arrivals)
    for i, (tokens, scores) in enumerate(wanted(name)):
        assert [events[i, choice][0].tokens for choice in range(len(tokens))] == [tuple(t) for t in tokens]
        assert [events[i, choice][0].score for choice in range(len(tokens))] == pytest.approx(scores, abs=1e-4)
    for i, output in enumerate(alone):
        found = [[t for e in events[10 + i, a.index] for t in e.tokens] for a in output.outputs]
        assert found == [a.token_ids for a in output.outputs]
    if spare is not None:
        assert engine.stats().preempted_recompute > 0


def run(engine: Engine, arrivals: dict[int, list[tuple[int, GenerationRequest]]]) -> dict[tuple[int, int], list[Event]]:
    events: dict[tuple[int, int], list[Event]] = {}
    step = 0
    while len(engine) or any(when >= step for when in arrivals):
        for number, request in arrivals.get(step, ()):
            engine.add(number, request)
        for event in engine.step():
            assert event.error is None
            events.setdefault((event.request, event.choice), []).append(event)
        engine.check()
        step += 1
        assert step < 2000, "no progress"
    return events


def test_beams_share_the_pages_of_their_prompt() -> None:
    _, llm = peers("llama_gqa")
    engine = Engine(llm.loaded, config(llm))
    engine.add(0, GenerationRequest(PROMPTS[2], PARAMS[1], ()))
    most = 0
    while len(engine):
        engine.step()
        most = max(most, engine.stats().groups[0].used_pages)
    assert (
        7 + 5 <= most <= 7 + 5 * 3 < 5 * 10
    )  # pages of 4 tokens: 7 full ones of the prompt, then 9 tokens for each of 5 beams


def test_an_abort_at_any_step_leaves_nothing() -> None:
    _, llm = peers("gemma3")
    for when in range(14):
        engine = Engine(llm.loaded, config(llm, max_num_seqs=4))
        engine.add(0, GenerationRequest(PROMPTS[2], PARAMS[2], ()))
        engine.add(1, GenerationRequest(PROMPTS[0], PARAMS[0], ()))
        events = []
        for step in range(200):
            if step == when:
                engine.abort(0)
            if not len(engine) and step > when:
                break
            events += engine.step() if len(engine) else []
            engine.check()
        assert [e.tokens for e in events if e.request == 1] == [tuple(t) for t in wanted("gemma3")[0][0]]
        assert engine.stats().groups[0].used_pages == 0


def test_beam_searches_that_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    _, llm = peers("llama_gqa")
    with pytest.raises(RequestError, match="exceed the context"):
        llm.generate([PROMPTS[0]], BeamSearchParams(beam_width=2, max_tokens=10**6))
    with pytest.raises(RequestError, match="token ids are 0"):
        llm.generate([PROMPTS[0]], BeamSearchParams(beam_width=2, stop_token_ids=(10**6,)))
    forward = type(llm.loaded.model).logits
    with TemporaryDirectory() as folder:
        build(CASES["llama_gqa"], folder)
        llm = LLM(folder)  # a model that has recorded no step
    monkeypatch.setattr(type(llm.loaded.model), "logits", lambda *args: forward(*args) * float("nan"))
    (output,) = llm.generate([PROMPTS[0]], PARAMS[0])
    assert {a.finish_reason for a in output.outputs} == {"error"}
    assert "NaN" in str(output.outputs[0].error)
    monkeypatch.undo()
    assert llm.generate([PROMPTS[0]], PARAMS[0])[0].outputs[0].token_ids == wanted("llama_gqa")[0][0][0]
    with TemporaryDirectory() as folder:
        build(CASES["llama_gqa"], folder)
        (output,) = LLM(folder, cache="off").generate([PROMPTS[0]], PARAMS[0])
    assert "--cache on" in str(output.outputs[0].error)
