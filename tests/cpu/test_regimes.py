"""Rotations that depend on a sequence's length: the tokens equal those of transformers' `generate` in every way of
serving.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from oracle.build import build
from oracle.case import VOCAB
from oracle.families import CASES
from ridgeline import LLM, BeamSearchParams, SamplingParams
from ridgeline.engine import Engine
from ridgeline.runtime.generator import GenerationRequest
from ridgeline.sample.sampler import NoiseKey
from ridgeline.settings import EngineOptions

# Maps the name of an oracle case to its trained length.
TRAINED = {"phi3_longrope": 48, "llama_dynamic_long": 64}
NEW_TOKENS = 16
GREEDY = SamplingParams(max_tokens=NEW_TOKENS, temperature=0, ignore_eos=True)
SEED = 5  # with this seed, every greedy token leads by more than SAFE_LEAD
SAFE_LEAD = 1e-3  # least difference of the logits of a greedy token and of the next best one


@cache
def folder(name: str) -> TemporaryDirectory[str]:
    """Return the folder in which transformers' model is saved."""
    saved = TemporaryDirectory()
    build(CASES[name], saved.name)
    return saved


def fresh(name: str) -> Any:
    """Return a new model of transformers: with dynamic NTK, a used model keeps the length of its longest sequence."""
    return AutoModelForCausalLM.from_pretrained(folder(name).name, dtype=torch.float32).eval()


@cache
def served(name: str, device: str = "cpu", **options: Any) -> LLM:
    engine = EngineOptions(block_size=4, max_num_batched_tokens=16) if options.get("cache") != "off" else None
    return LLM(folder(name).name, max_model_len=160, device=device, engine=engine, **options)


def prompts(name: str) -> list[list[int]]:
    """Return prompts that end before the trained length, on it and after it; all but two begin with the same tokens."""
    rng, trained = np.random.default_rng(SEED), TRAINED[name]
    shared = rng.integers(3, VOCAB, 130).tolist()
    lengths = (trained - 30, trained - 1, trained, trained + 1, trained + 20, trained + 60)
    return [rng.integers(3, VOCAB, 5).tolist(), rng.integers(3, VOCAB, 100).tolist(), *(shared[:n] for n in lengths)]


@cache
def wanted(name: str) -> list[list[int]]:
    """Return greedy tokens of transformers, each prompt alone."""
    return [_generate(fresh(name), prompt) for prompt in prompts(name)]


def _generate(model: Any, prompt: Sequence[int]) -> list[int]:
    with torch.no_grad():
        found = model.generate(
            torch.tensor([prompt]), max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0,
            return_dict_in_generate=True, output_logits=True,
        )  # fmt: skip
    best = torch.stack(found.logits)[:, 0].topk(2).values
    assert float((best[:, 0] - best[:, 1]).min()) > SAFE_LEAD, "a greedy token is nearly tied; choose another seed"
    tokens: list[int] = found.sequences[0, len(prompt) :].tolist()
    return tokens


def tokens_of(llm: LLM, name: str) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(prompts(name), GREEDY)]


@pytest.mark.parametrize("name", TRAINED)
@pytest.mark.parametrize("device", ["cpu", pytest.param("reference", marks=pytest.mark.slow)])
def test_pages_give_the_tokens_of_generate(name: str, device: str) -> None:
    """Prompts run in one batch, in chunks, and a second time with prefix hits; on `cpu`, decode steps are recorded."""
    llm = served(name, device)
    assert tokens_of(llm, name) == tokens_of(llm, name) == wanted(name)
    stats = llm.stats()
    assert stats is not None and stats.hit_tokens > 0
    assert device != "cpu" or stats.unrecorded is None


@pytest.mark.parametrize("name", TRAINED)
@pytest.mark.parametrize("options", [{"cache": "off"}, {"batching": "static"}], ids=str)
def test_other_ways_to_serve_give_the_same_tokens(name: str, options: dict[str, str]) -> None:
    assert tokens_of(served(name, **options), name) == wanted(name)


def test_a_restart_is_no_preemption() -> None:
    llm = served("phi3_longrope")
    before = llm.stats()
    (output,) = llm.generate([prompts("phi3_longrope")[0]], replace(GREEDY, max_tokens=60))
    after = llm.stats()
    assert before is not None and after is not None
    assert output.num_preempted == 0 and after.preempted_recompute == before.preempted_recompute


@pytest.mark.parametrize("name", TRAINED)
def test_no_prefix_is_shared_between_regimes(name: str) -> None:
    """A prompt beyond the trained length does not use the pages of a shorter one."""
    llm, trained = served(name), TRAINED[name]
    text = np.random.default_rng(9).integers(3, VOCAB, 120).tolist()
    lengths = (trained - 8, trained - 3, trained + 20, trained + 20, trained + 28)
    found = [llm.generate([text[:n]], replace(GREEDY, max_tokens=1))[0].num_cached_tokens for n in lengths]
    # LongRoPE rotates all longer sequences alike; dynamic NTK only those whose prompts have one length.
    longer = trained + 20 if name == "phi3_longrope" else 0
    assert found == [0, trained - 8, 0, trained + 16, longer]


def test_beams_that_pass_the_length_are_those_of_transformers() -> None:
    name = "phi3_longrope"
    model, llm = fresh(name), served(name)
    prompt = prompts(name)[1][:42]
    with torch.no_grad():
        found = model.generate(
            torch.tensor([prompt]), num_beams=3, do_sample=False, max_new_tokens=14, eos_token_id=None, pad_token_id=0,
            return_dict_in_generate=True, output_scores=True,
        )  # fmt: skip
    (output,) = llm.generate([prompt], BeamSearchParams(beam_width=3, max_tokens=14, ignore_eos=True))
    assert output.outputs[0].token_ids == found.sequences[0, len(prompt) :].tolist()
    assert output.outputs[0].score == pytest.approx(float(found.sequences_scores[0]), abs=1e-4)


@pytest.mark.parametrize("name", TRAINED)
def test_several_answers_fork_and_exceed_the_length(name: str) -> None:
    prompt = prompts(name)[1][: TRAINED[name] - 5]
    params = SamplingParams(n=3, max_tokens=NEW_TOKENS, temperature=1.0, seed=4, ignore_eos=True)
    one, other = (llm.generate([prompt], params)[0] for llm in (served(name), served(name, cache="off")))
    assert [a.token_ids for a in one.outputs] == [a.token_ids for a in other.outputs]
    assert len({tuple(a.token_ids) for a in one.outputs}) == 3


@pytest.mark.parametrize("name", TRAINED)
def test_drafts_that_would_pass_the_length_change_nothing(name: str) -> None:
    """Each step has five drafts, all of them right or the third one wrong."""
    llm = served(name)
    assert llm.config is not None
    engine = Engine(llm.loaded, replace(llm.config, num_speculative_tokens=5))
    for i, prompt in enumerate(prompts(name)):
        engine.add(i, GenerationRequest(prompt, GREEDY, (NoiseKey(0, 0),)))
    out: list[list[int]] = [[] for _ in wanted(name)]
    while len(engine):
        for event in engine.step():
            out[event.request] += event.tokens
        engine.check()
        for i, answer in enumerate(wanted(name)):
            drafts = answer[len(out[i]) :][:5]
            if len(drafts) > 3 and len(out[i]) % 2:
                drafts[2] = (drafts[2] + 1) % VOCAB
            engine.propose(i, 0, drafts)
    assert out == wanted(name)
    assert engine.stats().accepted_tokens > 30


def test_log_probabilities_of_a_prompt_are_of_its_regime() -> None:
    name = "phi3_longrope"
    params = SamplingParams(max_tokens=8, temperature=0, prompt_logprobs=0, ignore_eos=True)
    for length in (TRAINED[name], TRAINED[name] + 1):
        prompt = prompts(name)[1][:length]
        one, other = (llm.generate([prompt], params)[0] for llm in (served(name), served(name, cache="off")))
        assert one.prompt_logprobs is not None and other.prompt_logprobs is not None
        found = [[entry.logprob for entry in each.prompt_logprobs[1:]] for each in (one, other)]
        assert found[0] == pytest.approx(found[1], abs=1e-5)
