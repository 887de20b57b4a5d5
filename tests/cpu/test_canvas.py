"""DiffusionGemma against transformers: the logits of each pass over a canvas, and the tokens of whole answers.

transformers' random draws are replaced by ours, which depend on the seed, the pass and the position alone.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import transformers
from transformers.models.diffusion_gemma.generation_diffusion_gemma import DiffusionGemmaGenerationConfig

from oracle.build import PLAIN, redraw
from oracle.case import VOCAB, WINDOW, rope, ropes
from ridgeline import LLM, SamplingParams
from ridgeline.diffusion.canvas import CanvasDenoiser
from ridgeline.diffusion.denoiser import PassNoise
from ridgeline.errors import ConfigError, RequestError
from ridgeline.load.checkpoint import open_checkpoint
from ridgeline.runtime import canvases, runner
from ridgeline.runtime.generator import GenerationRequest
from ridgeline.sample.logit_rows import LogitRows
from ridgeline.sample.noise import PURPOSE_CANVAS
from ridgeline.sample.sampler import NoiseKey, SampleRow, sample
from ridgeline.settings import EngineOptions
from ridgeline.spec import CanvasDiffusion
from ridgeline.verify import verify
from ridgeline.verify.baseline import Baseline, is_near
from ridgeline.verify.matrix import cases
from ridgeline.verify.requests import Prompts
from ridgeline.verify.run import run_case, scale_of

CANVAS, SEED, SHARPNESS = 8, 11, 0.3
KV_BYTES = 90_000  # a little more than the pages of the longest request
TEXT: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 88, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "global_head_dim": 24, "num_global_key_value_heads": 1,
    "sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"] * 2, "num_experts": 6,
    "top_k_experts": 3, "moe_intermediate_size": 20, "max_position_embeddings": 256, "rms_norm_eps": 1e-2,
    "final_logit_softcapping": 9.0, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    **ropes(rope(3000.0, "proportional", partial_rotary_factor=0.5), rope(700.0)),
}  # fmt: skip
EYES = {
    "model_type": "gemma4_vision", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8, "patch_size": 4, "position_embedding_size": 16,
}  # fmt: skip
SETTINGS: dict[str, Any] = {
    "max_denoising_steps": 4, "t_min": 0.3, "t_max": 0.9, "stability_threshold": 1, "confidence_threshold": 0.005,
    "sampler_config": {"_cls_name": "EntropyBoundSamplerConfig", "entropy_bound": 2.0},
}  # fmt: skip
# All tokens are kept, so that predictions settle.
EARLY: dict[str, Any] = {
    "max_denoising_steps": 16, "confidence_threshold": 9.0,
    "sampler_config": {"_cls_name": "EntropyBoundSamplerConfig", "entropy_bound": 99.0},
}  # fmt: skip


@cache
def folder(*, early: bool = False) -> tuple[TemporaryDirectory[str], Any]:
    """Return a saved tiny model, and the model itself. early: canvases are done early."""
    target = TemporaryDirectory()
    config = transformers.DiffusionGemmaConfig(text_config=TEXT, vision_config=EYES, canvas_length=CANVAS)
    model = transformers.DiffusionGemmaForBlockDiffusion._from_config(config, **PLAIN).to(torch.float32).eval()
    redraw(model, 5)
    for name, parameter in model.named_parameters():  # mild attention: what a pass gets wrong grows in those after it
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            parameter.data.mul_(SHARPNESS)
    model.generation_config = DiffusionGemmaGenerationConfig(**deepcopy(SETTINGS | (EARLY if early else {})))
    model.save_pretrained(target.name)
    return target, model


@cache
def engine(device: str = "cpu") -> LLM:
    return LLM(folder()[0].name, device=device, max_model_len=160)


@dataclass
class Draws:
    """Our noise for the draws of transformers' generate: each canvas has a start, and passes count from 0."""

    prompt: int
    params: SamplingParams
    start: int = 0
    number: int = 0
    logits: list[np.ndarray] = field(default_factory=list)

    def noise(self) -> PassNoise:
        return PassNoise(SEED, 0, self.number)

    def randint(self, low: int, high: int, size: tuple[int, int], device: Any = None) -> torch.Tensor:
        """Return a random canvas: of a new answer part before its first pass, and after a pass of the next one."""
        noise = self.noise()
        values = [int(noise.uniform(self.start + i, PURPOSE_CANVAS) * high) for i in range(size[1])]
        return torch.tensor([values])

    def multinomial(self, chances: torch.Tensor, num_samples: int) -> torch.Tensor:
        rows = [
            SampleRow(self.params, self.noise(), self.start + i, frozenset(), frozenset(), None, ())
            for i in range(len(chances))
        ]
        found = sample(np.log(chances.numpy()), rows)
        self.number += 1  # the canvas is drawn again for the next pass
        return torch.tensor([[one.token] for one in found])


@contextmanager
def drawn(model: Any, draws: Draws) -> Iterator[None]:
    """Replace the random draws, and record the logits of each pass."""
    begin, forward = model._prepare_denoiser_inputs, model.forward

    def opened(**given: Any) -> Any:
        draws.start, draws.number = given["cache"].get_seq_length(), 0
        return begin(**given)

    def recorded(**given: Any) -> Any:
        out = forward(**given)
        draws.logits.append(out.logits[0].numpy())
        return out

    with (
        patch.object(model, "_prepare_denoiser_inputs", opened), patch.object(model, "forward", recorded),
        patch.object(torch.compiler, "cudagraph_mark_step_begin", lambda: None),  # it imports a compiler
        patch.object(torch, "randint", draws.randint), patch.object(torch, "multinomial", draws.multinomial),
    ):  # fmt: skip
        yield


def theirs(prompt: list[int], tokens: int, params: SamplingParams, model: Any = None) -> tuple[list[int], Draws]:
    """Return the answer of transformers, and its logits of each pass."""
    model = model or folder()[1]
    draws = Draws(len(prompt), params)
    with drawn(model, draws), torch.no_grad():
        found = model.generate(torch.tensor([prompt]), max_new_tokens=tokens, eos_token_id=[VOCAB])  # no token ends it
    return found.sequences[0, len(prompt) :].tolist(), draws


def ours(prompt: list[int], params: SamplingParams, llm: LLM | None = None) -> tuple[list[int], list[np.ndarray]]:
    """Return our answer, and the logits of each pass."""
    seen: list[np.ndarray] = []
    take = CanvasDenoiser.take

    def watched(self: CanvasDenoiser, logits: LogitRows, work: Any) -> Any:
        if work.num_draft:
            seen.append(np.concatenate([piece.copy() for _, piece in logits.pieces()]))
        return take(self, logits, work)

    with patch.object(CanvasDenoiser, "take", watched):
        (output,) = (llm or engine()).generate([prompt], params)
    return list(output.outputs[0].token_ids), seen


def prompt_of(length: int) -> list[int]:
    return np.random.default_rng([3, length]).integers(3, VOCAB, length).tolist()


@pytest.mark.parametrize("device", ["cpu", "reference"])
@pytest.mark.parametrize(("length", "temperature"), [(1, 1.0), (5, 0.0), (30, 1.0), (61, 0.7)])
def test_answers_equal_transformers(length: int, temperature: float, device: str) -> None:
    prompt = prompt_of(length)
    params = SamplingParams(max_tokens=3 * CANVAS, temperature=temperature, seed=SEED, ignore_eos=True)
    tokens, logits = ours(prompt, params, engine(device))
    wanted, draws = theirs(prompt, 3 * CANVAS, params)
    assert max(float(np.abs(a - b).max()) for a, b in zip(logits, draws.logits, strict=True)) < 1e-4
    assert tokens == wanted
    assert len(logits) == 3 * SETTINGS["max_denoising_steps"] and len(set(tokens)) > 8


def test_a_canvas_that_is_stable_and_confident_is_done_early() -> None:
    target, model = folder(early=True)
    prompt, params = prompt_of(12), SamplingParams(max_tokens=2 * CANVAS, temperature=0.0, seed=SEED, ignore_eos=True)
    llm = LLM(target.name, device="cpu", max_model_len=160)
    tokens, logits = ours(prompt, params, llm)
    wanted, draws = theirs(prompt, 2 * CANVAS, params, model)
    assert tokens == wanted
    assert 2 < len(logits) == len(draws.logits) < 2 * EARLY["max_denoising_steps"]


def test_company_chunks_and_preemption_change_nothing() -> None:
    prompts = [prompt_of(n) for n in (3, 40, 17, 55, 29)]
    params = [SamplingParams(max_tokens=n, seed=n, ignore_eos=True) for n in (20, 9, 33, 8, 25)]
    alone = [engine().generate([p], q)[0].outputs[0].token_ids for p, q in zip(prompts, params, strict=True)]
    for options in (
        EngineOptions(max_num_batched_tokens=CANVAS + 3, block_size=4, max_num_seqs=3),
        EngineOptions(block_size=8, max_num_seqs=5, kv_cache_memory_bytes=KV_BYTES),
    ):
        llm = LLM(folder()[0].name, device="cpu", max_model_len=96, engine=options)
        found = llm.generate(prompts, params)
        assert [output.outputs[0].token_ids for output in found] == alone
        again = llm.generate(prompts, params)  # prompts are in the prefix cache
        assert [output.outputs[0].token_ids for output in again] == alone
    stats = llm.stats()
    assert stats is not None and stats.preempted_recompute


def test_answers_end_at_the_end_token_and_at_max_tokens() -> None:
    prompt = prompt_of(20)
    whole = engine().generate([prompt], SamplingParams(max_tokens=3 * CANVAS, seed=1, ignore_eos=True))[0].outputs[0]
    tokens = list(whole.token_ids)
    end = tokens[CANVAS + 2]
    cut = engine().generate(
        [prompt], SamplingParams(max_tokens=3 * CANVAS, seed=1, ignore_eos=True, stop_token_ids=[end], logprobs=2)
    )[0].outputs[0]  # fmt: skip
    assert list(cut.token_ids) == tokens[: tokens.index(end) + 1] and cut.finish_reason == "stop"
    assert cut.logprobs is not None and len(cut.logprobs) == len(cut.token_ids)
    short = engine().generate([prompt], SamplingParams(max_tokens=CANVAS + 3, seed=1, ignore_eos=True))[0].outputs[0]
    assert list(short.token_ids) == tokens[: CANVAS + 3] and short.finish_reason == "length"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"confidence_threshold": 0.9}, "confidence_threshold is 0.9, but a pass over a canvas"),
        ({"remasking": "random"}, "remasking is random"),
        ({"cfg_scale": 1.0}, "cfg_scale"),
        ({"suffix_token_ids": (5,)}, "sees its canvas of 8"),
        ({"repetition_penalty": 1.2}, "needs the tokens before a token"),
        ({"max_tokens": 160}, "canvases of 8 and max_tokens 160 exceed the context of 160"),
    ],
)
def test_requests_that_cannot_be_served(given: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        engine().generate([prompt_of(5)], SamplingParams(**{"max_tokens": 8, **given}))


def test_settings_that_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="cache is off, but a canvas"):
        LLM(folder()[0].name, device="cpu", cache="off")
    with pytest.raises(RequestError, match="is 5, but a canvas of this model has 8 tokens"):
        LLM(folder()[0].name, device="cpu", engine=EngineOptions(max_num_batched_tokens=5))
    broken = {**SETTINGS, "sampler_config": {"_cls_name": "Other"}}
    shutil.copytree(folder()[0].name, tmp_path / "model")
    (tmp_path / "model/generation_config.json").write_text(json.dumps(broken))
    with pytest.raises(ConfigError, match="is not an EntropyBoundSamplerConfig"):
        open_checkpoint(tmp_path / "model")


def test_settings_come_from_generation_config() -> None:
    canvas = engine().loaded.spec.diffusion
    assert isinstance(canvas, CanvasDiffusion)
    assert (canvas.canvas, canvas.passes, canvas.entropy_bound, canvas.t_min) == (8, 4, 2.0, 0.3)
    assert engine().loaded.checkpoint.notes == (
        "only the language model of this checkpoint is loaded, without the encoder of images",
    )


# ---- ridgeline verify --------------------------------------------------------------------------------------------


def noise_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    take = CanvasDenoiser.take

    def by_row(self: Any, logits: Any, work: Any) -> Any:
        self._row.noise = replace(self._row.noise, choice=work.row)
        return take(self, logits, work)

    monkeypatch.setattr(CanvasDenoiser, "take", by_row)


def signals_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each canvas reads what the canvas after it in the step has predicted."""
    run = canvases.over_canvases

    def swapped(works: Any, forward: Any) -> Any:
        return run(works, lambda some, signal: forward(some, None if signal is None else np.roll(signal, CANVAS, 0)))

    monkeypatch.setattr(runner, "over_canvases", swapped)


def test_verify_serves_its_axes() -> None:
    """Chunks hold a canvas, the last canvas is cut, and what a diffusion model does not have is not run."""
    report = verify(loaded := engine().loaded, quick=True)
    assert report.equal and report.complete
    assert {r.case.axis for r in report.results if r.verdict == "not run"} == {"drafts", "in flight"}
    assert report.new_tokens % CANVAS
    scale = scale_of(loaded, None, quick=False, new_tokens=None)
    found = cases(scale, 0)
    assert all((case.chunk or CANVAS) >= CANVAS for case in found)
    assert {case.preempt for case in found} == {None, "recompute", "swap"}


@pytest.mark.parametrize("bug", [noise_by_row, signals_of_others])
def test_verify_finds_wrong_engines(bug: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The baseline is the same engine, where each request is alone."""
    loaded = engine().loaded
    scale = scale_of(loaded, None, quick=True, new_tokens=None)
    case = next(case for case in cases(scale, 0) if case.axis == "batch")
    bug(monkeypatch)
    assert run_case(loaded, case, scale, Prompts(VOCAB, {2}, 0), Baseline(loaded)).verdict == "DIFFERENT"


def test_verify_knows_near_ties() -> None:
    """A token that logits moved by rounding would give is near; one that no rounding gives is not."""
    loaded = engine().loaded
    params = SamplingParams(max_tokens=CANVAS, temperature=0, denoising_passes=2, ignore_eos=True)
    request = GenerationRequest(prompt_of(9), params, (NoiseKey(SEED, 0),))
    baseline = Baseline(loaded)
    expected = baseline.answer(request, 0).tokens
    assert len(expected) == CANVAS
    assert is_near(baseline.gap(request, 0, 3, expected[3]))
    assert not is_near(baseline.gap(request, 0, 3, (expected[3] + 1) % VOCAB))
