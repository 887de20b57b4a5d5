"""Block caches of models that see whole sequences, against their definition in float64 (oracle/llada.py)."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from cpu.test_denoise import _folder, blocks
from cpu.test_llada import MASK, MODELS, sequence, write
from oracle import llada
from ridgeline import LLM, SamplingParams
from ridgeline.diffusion import denoiser
from ridgeline.errors import RequestError
from ridgeline.evals.block_cache import measure_block_cache
from ridgeline.runtime import layout
from ridgeline.settings import EngineOptions
from ridgeline.verify import verify


@cache
def folder_of(name: str) -> tuple[Any, Any]:
    folder = TemporaryDirectory()
    return folder, write(Path(folder.name), MODELS[name])


def load(name: str, kind: str | None, cache: Any = "on", **options: Any) -> LLM:
    engine = None if cache == "off" else EngineOptions(**options)
    return LLM(folder_of(name)[0].name, block_cache=kind, cache=cache, engine=engine)


def params_of(**more: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 12, "temperature": 0, "ignore_eos": True, "block_length": 5, **more})


@pytest.mark.parametrize(("name", "kind"), [(name, kind) for name in MODELS for kind in ("prefix", "dual")])
def test_answers_are_those_of_the_definition(name: str, kind: str) -> None:
    """The last block is shorter. A suffix follows, and a pass keeps one token, or those above a threshold."""
    w, shift = folder_of(name)[1], int(name == "dream")
    llms, plain, changed = [load(name, kind), load(name, kind, "off")], load(name, "none"), False
    for length, suffix, threshold in ((9, (), None), (1, tuple(sequence(5)), 0.2)):
        wanted = llada.cached_generate(
            MODELS[name], w, sequence(length), 12, 5, kind, shift=shift, suffix=suffix, threshold=threshold, mask=MASK
        )
        params = params_of(suffix_token_ids=suffix, confidence_threshold=threshold)
        for llm in llms:
            assert llm.generate([sequence(length)], params)[0].outputs[0].token_ids == wanted
        changed |= plain.generate([sequence(length)], params)[0].outputs[0].token_ids != wanted
    assert changed  # it is an approximation, and it is in use


DRAWN = params_of(temperature=1.0, seed=11, n=2, max_tokens=20, block_length=8, denoising_passes=3)
PROMPTS = [sequence(n) for n in (1, 63, 64, 5, 100)]


def answers(llm: LLM, prompts: list[list[int]] = PROMPTS) -> list[list[list[int]]]:
    return [[one.token_ids for one in output.outputs] for output in llm.generate(prompts, DRAWN)]


@cache
def alone(kind: str) -> list[list[list[int]]]:
    """Return the answers without pages and company."""
    return [answers(load("dream", kind, "off"), [one])[0] for one in PROMPTS]


@pytest.mark.parametrize("kind", ["prefix", "dual"])
def test_no_setting_changes_an_answer(kind: str) -> None:
    """First passes and later ones of several sequences share steps; pages hold one token, or many."""
    for options in ({}, {"block_size": 1}, {"max_num_seqs": 3, "max_num_batched_tokens": 128}):
        llm = load("dream", kind, **options)
        assert answers(llm) == alone(kind)
        llm.session.check()


def test_a_sequence_that_lost_its_rows_computes_its_first_pass_again() -> None:
    group = load("llada", "dual", block_size=16).config.groups[0]
    llm = load("llada", "dual", block_size=16, kv_cache_memory_bytes=(group.num_pages(128) + 2) * group.page_bytes)
    slow, urgent = replace(DRAWN, max_tokens=80, n=1, denoising_passes=None), replace(DRAWN, max_tokens=60, n=1, seed=4)
    frontend, engine = llm.frontend, llm.session._generator
    wanted = [load("llada", "dual").generate([sequence(30)], one)[0] for one in (slow, urgent)]
    engine.add(0, frontend.request(sequence(30), slow, priority=1))
    found: dict[int, list[int]] = {0: [], 1: []}
    passes = {0: 0, 1: 0}
    for step in range(1000):
        if step == 11:  # within a block
            engine.add(1, frontend.request(sequence(30), urgent, priority=0))
        for event in engine.step():
            found[event.request] += event.tokens
            passes[event.request] = event.num_passes
        if not len(engine):
            break
    assert engine.stats().preempted_recompute > 0
    assert list(found.values()) == [output.outputs[0].token_ids for output in wanted]
    assert list(passes.values()) == [output.num_passes for output in wanted]


def test_the_price_is_measured() -> None:
    """Without a block cache nothing is lost, and a block that reads its own rows alone loses nothing either."""
    ids = sequence(100)
    found = {kind: measure_block_cache(load("llada", kind, "off").loaded, ids) for kind in ("prefix", "dual")}
    assert all(0 < price.kl < 10 and price.top1_agreement < 1 for price in found.values())
    assert found["prefix"] != found["dual"]
    (note,) = [note for note in load("llada", "dual").loaded.notes if "block cache" in note]
    assert note.startswith("block cache dual is approximate: the accuracy cost is not known: there is no tokenizer")
    with pytest.raises(RequestError, match="the sample text has 12 tokens, and needs 20"):
        measure_block_cache(load("llada", "dual", "off").loaded, ids[:12])


def test_what_cannot_work_is_refused() -> None:
    with pytest.raises(RequestError, match=r"block_cache .--block-cache. is 'both'; known are none, prefix, dual"):
        load("llada", "both")
    with pytest.raises(RequestError, match=r"block_cache .--block-cache. is dual, but qwen3 has no block cache"):
        LLM("pocket", block_cache="dual")
    with pytest.raises(RequestError, match="but ours sees nothing after its block, so that its pages are an exact"):
        LLM(_folder(blocks(4)).name, block_cache="none")
    with pytest.raises(RequestError, match=r"cfg_scale is 1.5, but block_cache .--block-cache. is dual: guidance"):
        load("llada", "dual").generate([sequence(5)], params_of(cfg_scale=1.5))


@pytest.mark.slow
def test_verify_finds_all_equal() -> None:
    report = verify(load("dream", "dual", "off").loaded, quick=True)
    assert report.equal
    assert report.complete


@pytest.mark.parametrize("bug", ["a row before the block changes", "rows after the block are not read"])
def test_planted_bugs_are_seen(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    part = denoiser.Denoiser._part

    def early(self: Any, whole: Any) -> Any:
        tokens, (first, reads) = part(self, whole), self.part
        self.part, self.wanted = (first - 1, reads), (1, len(self._open.tokens) + 1)
        return (whole[first - 1], *tokens)

    alone("dual")
    if bug == "a row before the block changes":
        monkeypatch.setattr(denoiser.Denoiser, "_part", early)
    else:
        monkeypatch.setattr(layout.Slices, "reading", lambda self: self)
    assert answers(load("dream", "dual"), PROMPTS[1:]) != alone("dual")[1:]
