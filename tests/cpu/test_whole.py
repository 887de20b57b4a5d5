"""Models that see whole sequences, in the engine, against their definition (oracle/denoise.py)."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from cpu.test_denoise import DECODERS, MARGIN, MASK, NAMES, _folder, blocks, greedy, load, prompt, seeing, tokens_of
from oracle.definition import wide
from oracle.denoise import denoise
from oracle.ours import random_weights
from ridgeline import LLM, SamplingParams
from ridgeline.diffusion import denoiser, edit_notes, length_notes
from ridgeline.errors import RequestError
from ridgeline.runtime.request import Frontend
from ridgeline.spec import MaskedDiffusion, ModelSpec, WholeSequence
from ridgeline.spec.diffusion import Schedule


def whole(predicts_next: bool = False, schedule: Schedule = "equal") -> ModelSpec:
    return seeing(WholeSequence(), MaskedDiffusion(MASK, predicts_next, schedule))


@pytest.mark.parametrize("predicts_next", [False, True], ids=["own", "next"])
@pytest.mark.parametrize("decoder", DECODERS)
def test_answers_are_those_of_the_definition(decoder: str, predicts_next: bool) -> None:
    """The whole answer is one block, or blocks of 5 tokens, whose last one is shorter; with guidance, and without."""
    spec, options = whole(predicts_next, "time" if predicts_next else "equal"), DECODERS[decoder]
    given = {NAMES.get(name, name): value for name, value in options.items()}
    weights, llm, seen = wide(random_weights(spec)), load(spec), 0
    for length, block, cfg in ((3, None, 0.0), (16, 5, 0.0), (21, 5, 0.8)):
        wanted = denoise(spec, weights, prompt(length), 12, block or 12, cfg=cfg, **options)
        if wanted.margin < MARGIN:
            continue  # a near tie: either answer is right
        params = greedy(max_tokens=12, block_length=block, cfg_scale=cfg, **given)
        (got,) = llm.generate([prompt(length)], params)
        assert got.outputs[0].token_ids == wanted.tokens
        assert MASK not in wanted.tokens
        assert got.num_passes == wanted.passes * (2 if cfg else 1)
        seen += 1
    assert seen


DRAWN = SamplingParams(
    max_tokens=20, seed=11, temperature=1.0, block_length=8, denoising_passes=3, ignore_eos=True, n=2, cfg_scale=0.5
)
PROMPTS = [prompt(n) for n in (1, 63, 64, 65, 5, 100)]


@functools.cache
def alone() -> list[list[list[int]]]:
    """Return the answers to prompts that are served one after the other, each by a new engine."""
    return [tokens_of(load(whole(True)).generate([one], DRAWN))[0] for one in PROMPTS]


WAYS: dict[str, dict[str, Any]] = {
    "together": {},
    "short steps": {"max_num_batched_tokens": 257},
    "pages of a token": {"block_size": 1},
    "three at once": {"max_num_seqs": 3},
    "few pages": {"kv_cache_memory_bytes": 0},
}


@pytest.mark.parametrize("way", WAYS)
def test_no_setting_changes_an_answer(way: str) -> None:
    options = dict(WAYS[way])
    if "kv_cache_memory_bytes" in options:
        config = load(whole(True)).config
        assert config is not None
        group = config.groups[0]
        options["kv_cache_memory_bytes"] = (group.num_pages(256) + 2) * group.page_bytes
    llm = load(whole(True), **options)
    assert tokens_of(llm.generate(PROMPTS, DRAWN)) == alone()
    llm.session.check()


def test_no_cache_gives_the_same_answers() -> None:
    llm = LLM(_folder(whole(True)).name, cache="off")
    assert tokens_of(llm.generate(PROMPTS, DRAWN)) == alone()


def test_an_urgent_request_takes_pages_of_another_one() -> None:
    """A sequence that lost its pages goes on with the tokens that it has, and keeps its answer."""
    spec = whole(True)
    config = load(spec, block_size=16).config
    assert config is not None
    group = config.groups[0]
    llm = load(spec, block_size=16, kv_cache_memory_bytes=(group.num_pages(256) + 2) * group.page_bytes)
    slow, urgent = replace(DRAWN, max_tokens=120, n=1), replace(DRAWN, max_tokens=120, n=1, seed=4)
    frontend, engine = llm.frontend, llm.session._generator
    wanted = {i: load(spec).generate([prompt(30)], p)[0].outputs[0].token_ids for i, p in enumerate((slow, urgent))}
    engine.add(0, frontend.request(prompt(30), slow, priority=1))
    found: dict[int, list[int]] = {0: [], 1: []}
    for step in range(1000):
        if step == 5:
            engine.add(1, frontend.request(prompt(30), urgent, priority=0))
        for event in engine.step():
            found[event.request] += event.tokens
        if not len(engine):
            break
    stats = engine.stats()
    assert stats is not None and stats.preempted_recompute > 0
    assert found == wanted


def test_ends_and_lengths() -> None:
    """The length of an answer is a part of the question: a longer one has other tokens. An end token cuts it."""
    spec = whole()
    weights, llm, start = wide(random_weights(spec)), load(spec), prompt(5, 3)
    answer = denoise(spec, weights, start, 12, 4)
    assert answer.margin > MARGIN
    end, at = answer.tokens[5], answer.tokens.index(answer.tokens[5])
    (got,) = llm.generate([start], greedy(max_tokens=12, block_length=4, stop_token_ids=[end], logprobs=1))
    assert (got.outputs[0].token_ids, got.outputs[0].finish_reason) == (answer.tokens[: at + 1], "stop")
    assert len(got.outputs[0].logprobs or ()) == at + 1
    (longer,) = llm.generate([start], greedy(max_tokens=30, block_length=4))
    assert longer.outputs[0].token_ids[:12] != answer.tokens


@pytest.mark.parametrize("predicts_next", [False, True], ids=["own", "next"])
def test_a_gap_before_a_suffix_is_filled(predicts_next: bool) -> None:
    """Every pass sees the suffix, except the one of guidance without the prompt; a sequence may fill its context."""
    spec = whole(predicts_next)
    weights, seen = wide(random_weights(spec)), 0
    llms = [load(spec), load(spec, block_size=1), LLM(_folder(spec).name, cache="off")]
    for length, after, block, cfg in ((5, 1, 12, 0.0), (16, 9, 5, 0.0), (3, 20, 5, 0.8)):
        end = tuple(prompt(after, 8))
        wanted = denoise(spec, weights, prompt(length), 12, block, cfg=cfg, suffix=end)
        if wanted.margin < MARGIN:
            continue
        params = greedy(max_tokens=12, block_length=block, cfg_scale=cfg, suffix_token_ids=end)
        for llm in llms:
            assert llm.generate([prompt(length)], params)[0].outputs[0].token_ids == wanted.tokens
        assert llms[0].generate([prompt(length)], replace(params, suffix_token_ids=()))[0].outputs[0].token_ids != (
            wanted.tokens
        )
        seen += 1
    assert seen
    params = greedy(max_tokens=None, suffix_token_ids=prompt(100), denoising_passes=1)
    (full,) = llms[0].generate([prompt(100)], params)
    assert len(full.outputs[0].token_ids) == llms[0].max_model_len - 200


def test_the_default_length_is_stated() -> None:
    """The prompt and the suffix leave 56 tokens; without them, an answer has 256, or the context of 256 less one."""
    llm = load(whole())
    (note,) = [note for note in llm.loaded.notes if "answers have" in note]
    assert note.startswith("answers have 256 tokens, or what the context has left, unless max_tokens (--max-tokens)")
    assert length_notes(blocks(4)) == ()
    params = greedy(max_tokens=None, min_tokens=2)
    for model_len, length, tokens in ((256, 5, 251), (2048, 5, 256), (2048, 1900, 148)):
        frontend = Frontend(whole(), None, "", model_len, 0)
        assert frontend.request({"prompt_token_ids": [5] * length}, params).params.max_tokens == tokens
    assert frontend.request({"prompt_token_ids": [5]}, greedy(max_tokens=None, min_tokens=300)).params.max_tokens == 300
    assert Frontend(blocks(4), None, "", 256, 0).request({"prompt_token_ids": [5]}, params).params.max_tokens is None


def test_editing_without_training_is_remarked() -> None:
    params = greedy(edit_threshold=0.5)
    (note,) = edit_notes(params, whole())
    assert note.startswith("edit_threshold (--edit-threshold) is 0.5, but ours was not trained")
    trained = seeing(WholeSequence(), MaskedDiffusion(MASK, edits=True))
    assert edit_notes(params, trained) == edit_notes(greedy(), whole()) == ()


def refused(llm: LLM, params: SamplingParams, tokens: Sequence[int], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        llm.generate([list(tokens)], params)


def test_what_cannot_work_is_refused() -> None:
    refused(
        load(blocks(4)), greedy(block_length=8), prompt(5), "block_length is 8, but the blocks of this model have 4"
    )
    refused(load(blocks(4)), greedy(cfg_scale=1.0), prompt(5), "cfg_scale is 1.0, but guidance needs passes without")
    refused(load(whole()), greedy(), [5, MASK], "the prompt has the mask token 2")
    refused(load(blocks(4)), greedy(suffix_token_ids=[5]), prompt(5), "a token of this model sees its own block of 4")
    refused(load(whole()), greedy(suffix_token_ids=[5, MASK]), prompt(5), "the suffix has the mask token 2")
    refused(load(whole()), greedy(suffix_token_ids=[10**6]), prompt(5), "suffix_token_ids has 1000000")
    refused(load(whole()), greedy(suffix=["a"]), prompt(5), "suffix needs a tokenizer")
    refused(load(whole()), greedy(suffix=["a"], suffix_token_ids=[5]), prompt(5), "both say what follows")
    refused(
        load(whole()), greedy(suffix_token_ids=prompt(200)), prompt(100), "and the suffix 200, which leaves no room"
    )
    refused(load(whole()), greedy(suffix_token_ids=prompt(50)), prompt(195), "the suffix's 50 and max_tokens 18 exceed")
    refused(load(whole()), greedy(repetition_penalty=1.2), prompt(5), "repetition_penalty needs the tokens before")
    for bad in ({"block_length": 0}, {"cfg_scale": -1.0}):
        with pytest.raises(RequestError, match=next(iter(bad))):
            greedy(**bad)
    with pytest.raises(RequestError, match="is 8, but this model computes whole sequences of up to"):
        load(whole(), max_num_batched_tokens=8)


@pytest.mark.parametrize("bug", ["the rest is not seen", "blocks do not end", "the prompt stays"])
def test_planted_bugs_are_seen(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted, own, begin = alone(), denoiser.Denoiser._sequence, denoiser.Denoiser._begin

    def cut(self: Any, tokens: Any) -> Any:
        return own(self, tokens)[: self._open.start + len(self._open.tokens)]

    def longer(self: Any, start: int, known: Any) -> None:
        self._block = 1 << 60
        self._row.params = replace(self._row.params, block_length=None)
        begin(self, start, known)

    def stays(self: Any, tokens: Any) -> Any:
        return (*tokens, *own(self, tokens)[len(tokens) :])

    planted = {"the rest is not seen": ("_sequence", cut), "blocks do not end": ("_begin", longer)}
    planted["the prompt stays"] = ("_sequence", stays)
    monkeypatch.setattr(denoiser.Denoiser, *planted[bug])
    assert tokens_of(load(whole(True)).generate(PROMPTS, DRAWN)) != wanted
