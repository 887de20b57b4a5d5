"""Logits of diffusion models, which are computed and turned into choices a piece at a time."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cpu.test_block_cache import load as load_llada
from cpu.test_block_cache import params_of
from cpu.test_canvas import engine as canvas_engine
from cpu.test_canvas import prompt_of
from cpu.test_denoise import blocks, load, prompt
from ridgeline import LLM, SamplingParams
from ridgeline.diffusion import denoiser
from ridgeline.sample import logit_rows
from ridgeline.sample.logit_rows import LogitRows, Pieces
from ridgeline.settings import EngineOptions, resolve
from ridgeline.spec import Blocks, ModelSpec

DRAWN = SamplingParams(max_tokens=25, seed=11, temperature=1.0, denoising_passes=3, ignore_eos=True, logprobs=2)


def test_rows_are_read_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = np.random.default_rng(1).normal(size=(257, 5)).astype(np.float32)
    monkeypatch.setattr(logit_rows, "PIECE", 100)
    pieces = Pieces(
        lambda first, end: logits[first:end].copy(), lambda first, end: LogitRows.of(logits[first:end].copy()), 5
    )
    for first, count in ((0, 1), (1, 63), (64, 100), (164, 93)):
        rows = pieces.rows(first, count)
        for own in (rows, rows.keep()):
            assert np.array_equal(np.concatenate([piece.copy() for _, piece in own.pieces()]), logits[first:][:count])
        assert all(len(piece) <= 20 for _, piece in rows.pieces())
    assert [at for at, _ in LogitRows.of(logits).pieces(3, 9)] == [3]


def answers(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> Any:
    """Return the tokens of answers, and their log probabilities to the bit."""
    found = [output.outputs[0] for output in llm.generate(prompts, params)]
    return [(one.token_ids, [(e.logprob, e.top) for e in one.logprobs or ()]) for one in found]


def block_answers() -> Any:
    return answers(load(blocks(16, predicts_next=True)), [prompt(5), prompt(21), prompt(32)], DRAWN)


def guided_answers() -> Any:
    return answers(load_llada("llada", None), [prompt(9)], params_of(cfg_scale=0.8, logprobs=1))


def canvas_answers() -> Any:
    return answers(canvas_engine(), [prompt_of(5), prompt_of(30)], replace(DRAWN, denoising_passes=None))


@pytest.mark.parametrize("run", [block_answers, guided_answers, pytest.param(canvas_answers, marks=pytest.mark.slow)])
def test_the_size_of_a_piece_changes_no_bit(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = run()
    for size in (1, 700):
        monkeypatch.setattr(logit_rows, "PIECE", size)
        assert run() == wanted


def wide(size: int, vocab: int) -> ModelSpec:
    return replace(blocks(size), vocab_size=vocab, max_position_embeddings=2048)


def test_a_pass_holds_a_piece_of_its_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """All logits of the pass take 134 MB; a piece takes 4."""
    llm = load(wide(64, 2**16))
    monkeypatch.setattr(logit_rows, "PIECE", 2**20)
    monkeypatch.setattr(denoiser, "ELEMENTS", 2**19)
    params = SamplingParams(max_tokens=64, temperature=0, denoising_passes=1, ignore_eos=True)
    tracemalloc.start()
    try:
        llm.generate([[5, 6]] * 8, params)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 48 * 2**20 < 4 * 8 * 64 * 2**16


def test_the_plan_has_room_for_large_batches_of_large_blocks() -> None:
    """All logits of 32 blocks of 256 over a vocabulary of 262,144 take 8.6 GB; they run beside their pages in less."""
    spec = wide(256, 262_144)
    assert spec.sight == Blocks(256)
    config = resolve(
        spec, 2048, EngineOptions(max_num_seqs=32, max_num_batched_tokens=32 * 256), free_bytes=10**9, fixed_len=True
    )
    (group,) = config.groups
    assert config.max_num_seqs == 32
    assert config.num_pages[0] > 32 * group.num_pages(2048)
