"""Block diffusion in the engine against its definition, which has no cache and no batch (oracle/denoise.py)."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from oracle.case import VOCAB
from oracle.definition import wide
from oracle.denoise import denoise
from oracle.ours import FULL, LENGTH, MLP, NORM, WIDTH, model, random_weights, write
from ridgeline import LLM, BeamSearchParams, SamplingParams
from ridgeline.diffusion import denoiser
from ridgeline.errors import RequestError
from ridgeline.runtime import layout
from ridgeline.sched.blocks import BlockScheduler
from ridgeline.settings import EngineOptions
from ridgeline.spec import Blocks, Layer, MaskedDiffusion, ModelSpec, Sight
from ridgeline.spec.request import RequestOutput, TokenLogprobs

MASK = 2  # in no prompt
MARGIN = 1e-4  # float32 is closer than this to the definition


def blocks(size: int, predicts_next: bool = False) -> ModelSpec:
    return seeing(Blocks(size), MaskedDiffusion(MASK, predicts_next))


def seeing(sight: Sight, diffusion: MaskedDiffusion) -> ModelSpec:
    layer = Layer(replace(FULL, sight=sight), MLP, NORM)
    return ModelSpec("ours", VOCAB, WIDTH, LENGTH, (layer, layer), NORM, diffusion=diffusion)


@functools.cache
def _folder(spec: ModelSpec) -> tempfile.TemporaryDirectory[str]:
    folder = tempfile.TemporaryDirectory()
    write(spec, folder.name)
    return folder


def load(spec: ModelSpec, **options: Any) -> LLM:
    return LLM(_folder(spec).name, engine=EngineOptions(**options))


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng([seed, length]).integers(3, VOCAB, length).tolist()


def greedy(**more: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 18, "temperature": 0, "ignore_eos": True, **more})


def tokens_of(outputs: Sequence[RequestOutput]) -> list[list[list[int]]]:
    return [[answer.token_ids for answer in output.outputs] for output in outputs]


DECODERS: dict[str, dict[str, Any]] = {
    "one token a pass": {},
    "3 passes": {"passes": 3},
    "margin": {"remasking": "top_margin", "passes": 4},
    "entropy": {"remasking": "entropy", "passes": 3},
    "threshold": {"threshold": 0.3},
    "factor": {"factor": 1.5},
    "entropy bound": {"bound": 6.0},
    "editing": {"threshold": 0.3, "edits": 0.2},
}
NAMES = {
    "passes": "denoising_passes", "threshold": "confidence_threshold", "factor": "confidence_factor",
    "bound": "entropy_bound", "edits": "edit_threshold",
}  # fmt: skip


MIDDLE = ("entropy bound", "editing")  # these run with blocks of 7 tokens only
RUNS = [(decoder, size) for decoder in DECODERS for size in (4, 7, 16) if size == 7 or decoder not in MIDDLE]


@pytest.mark.parametrize("predicts_next", [False, True], ids=["own", "next"])
@pytest.mark.parametrize(("decoder", "size"), RUNS)
def test_answers_are_those_of_the_definition(decoder: str, size: int, predicts_next: bool) -> None:
    """Prompts end within a block, at its end, and before the first one; answers end within a block."""
    spec, options = blocks(size, predicts_next), DECODERS[decoder]
    given = {NAMES.get(name, name): value for name, value in options.items()}
    weights, llm = wide(random_weights(spec)), load(spec)
    for length in (3, 16, 21):
        wanted = denoise(spec, weights, prompt(length), 18, size, **options)
        if wanted.margin < MARGIN:
            continue  # a near tie: either answer is right
        (got,) = llm.generate([prompt(length)], greedy(**given))
        assert got.outputs[0].token_ids == wanted.tokens
        assert MASK not in wanted.tokens
        assert got.num_passes <= wanted.passes


def test_blocks_of_one_token_are_an_autoregressive_model(tmp_path: Path) -> None:
    """The weights are those of an autoregressive model, untouched: greedy and drawn answers are its answers."""
    spec = blocks(1, predicts_next=True)
    write(replace(model([Layer(FULL, MLP, NORM)] * 2, "plain")), tmp_path)
    plain, ours = LLM(str(tmp_path)), load(spec)
    prompts = [prompt(n) for n in (1, 15, 16, 40)]
    for params in (
        greedy(max_tokens=30, bad_token_ids=[MASK], logprobs=2),
        SamplingParams(max_tokens=30, seed=5, n=3, top_p=0.9, bad_token_ids=[MASK], ignore_eos=True),
    ):
        a, b = plain.generate(prompts, params), ours.generate(prompts, params)
        assert tokens_of(a) == tokens_of(b)
        for x, y in zip(a, b, strict=True):
            assert logprobs_of(x) == pytest.approx(logprobs_of(y), abs=1e-4)


def logprobs_of(output: RequestOutput) -> list[float]:
    entries: list[TokenLogprobs] = [entry for answer in output.outputs for entry in answer.logprobs or ()]
    return [entry.logprob for entry in entries]


# ---- exact whatever else happens -----------------------------------------------------------------------------

DRAWN = SamplingParams(max_tokens=25, seed=11, temperature=1.0, denoising_passes=3, ignore_eos=True, n=2)
WAYS: dict[str, dict[str, Any]] = {
    "whole prompts": {},
    "chunks of a block": {"max_num_batched_tokens": 0},
    "pages of 4": {"block_size": 4},
    "few pages": {"block_size": 16, "kv_cache_memory_bytes": 0},
    "two sequences at once": {"max_num_seqs": 2},
}


def served(spec: ModelSpec, prompts: list[list[int]], **options: Any) -> list[list[list[int]]]:
    """Return the answers to prompts at once; 0 stands for as little as possible."""
    size = spec.block
    if options.get("max_num_batched_tokens") == 0:
        options["max_num_batched_tokens"] = size
    if options.get("kv_cache_memory_bytes") == 0:
        page = load(spec, block_size=16).config
        assert page is not None
        group = page.groups[0]
        options["kv_cache_memory_bytes"] = (group.num_pages(256) + 2) * group.page_bytes
    llm = load(spec, **options)
    found = tokens_of(llm.generate(prompts, DRAWN))
    llm.session.check()
    if options.get("kv_cache_memory_bytes"):
        stats = llm.stats()
        assert stats is not None and stats.preempted_recompute > 0
    return found


@functools.cache
def alone(size: int, predicts_next: bool) -> list[list[list[int]]]:
    """Return the answers to prompts that are served one after the other, each with a cold cache."""
    spec = blocks(size, predicts_next)
    return [tokens_of(load(spec).generate([one], DRAWN))[0] for one in PROMPTS]


SHARED = prompt(70, 9)
PROMPTS = [SHARED[:n] + prompt(more, i) for i, (n, more) in enumerate([(64, 5), (70, 1), (0, 33), (64, 9), (3, 1)])]
PROMPTS += [prompt(n) for n in range(60, 68)]


@pytest.mark.parametrize("predicts_next", [False, True], ids=["own", "next"])
@pytest.mark.parametrize("size", [4, 7, 64])
@pytest.mark.parametrize("way", WAYS)
def test_no_setting_changes_an_answer(way: str, size: int, predicts_next: bool) -> None:
    found = served(blocks(size, predicts_next), PROMPTS, **WAYS[way])
    assert found == alone(size, predicts_next)


@pytest.mark.parametrize("predicts_next", [False, True], ids=["own", "next"])
@pytest.mark.parametrize("size", [4, 7, 64])
def test_no_cache_gives_the_same_answers(size: int, predicts_next: bool) -> None:
    """Each pass computes the whole history again, as the definition does."""
    llm = LLM(_folder(blocks(size, predicts_next)).name, cache="off")
    found = llm.generate(PROMPTS, DRAWN)
    assert tokens_of(found) == alone(size, predicts_next)
    assert all(output.num_passes > 0 for output in found)
    (answer,) = llm.generate([prompt(5)], greedy(allowed_token_ids=[MASK]))
    assert answer.outputs[0].finish_reason == "error"
    (answer,) = llm.generate([prompt(5)], greedy(max_tokens=3, logprobs=2))
    assert answer.outputs[0].finish_reason == "length"
    assert len(answer.outputs[0].logprobs or ()) == 3


@pytest.mark.parametrize("size", [4, 7, 64])
def test_a_cached_prefix_changes_nothing(size: int) -> None:
    spec = blocks(size)
    llm = load(spec)
    first, again = (llm.generate(PROMPTS, DRAWN) for _ in range(2))
    assert tokens_of(first) == tokens_of(again) == alone(size, False)
    assert sum(output.num_cached_tokens for output in again) > 300


# ---- parameters ------------------------------------------------------------------------------------------------


def test_ends_lengths_masks_and_biases() -> None:
    size, start = 8, prompt(5, 3)
    spec = blocks(size)
    weights, llm = wide(random_weights(spec)), load(spec)
    whole = denoise(spec, weights, start, 30, size)
    assert whole.margin > MARGIN
    for count in (1, 3, 8, 30):
        (got,) = llm.generate([start], greedy(max_tokens=count))
        assert got.outputs[0].token_ids == whole.tokens[:count]
        assert got.outputs[0].finish_reason == "length"
    end = whole.tokens[12]
    (got,) = llm.generate([start], greedy(max_tokens=30, stop_token_ids=[end]))
    at = whole.tokens.index(end)
    assert (got.outputs[0].token_ids, got.outputs[0].stop_reason) == (whole.tokens[: at + 1], end)

    def edit(scores: Tensor, index: int) -> None:
        scores[7] += 4.0
        scores[9] -= 3.0
        scores[11] = -np.inf
        if index < 10:
            scores[end] = -np.inf

    wanted = denoise(spec, weights, start, 20, size, ends=(end,), edit=edit)
    assert wanted.margin > MARGIN
    params = greedy(
        max_tokens=20, logit_bias={7: 4.0, 9: -3.0}, bad_token_ids=[11], min_tokens=10, stop_token_ids=[end]
    )
    (got,) = llm.generate([start], params)
    assert got.outputs[0].token_ids == wanted.tokens
    (got,) = llm.generate([start], greedy(allowed_token_ids=[5, 6, 30]))
    assert set(got.outputs[0].token_ids) <= {5, 6, 30}
    (got,) = llm.generate([start], greedy(allowed_token_ids=[MASK]))
    assert got.outputs[0].finish_reason == "error"


def test_noise_depends_on_the_pass_the_position_and_the_answer() -> None:
    llm = load(blocks(8))
    drawn = SamplingParams(max_tokens=24, seed=1, n=4, ignore_eos=True, remasking="random", denoising_passes=2)
    (once,), (again,) = (llm.generate([prompt(9)], drawn) for _ in range(2))
    answers = [tuple(answer.token_ids) for answer in once.outputs]
    assert answers == [tuple(answer.token_ids) for answer in again.outputs]
    assert len(set(answers)) == 4
    key = denoiser.PassNoise(1, 0, 3).key(5, 0)
    assert key not in [denoiser.PassNoise(*other).key(at, 0) for other, at in (((1, 0, 2), 5), ((1, 0, 3), 6))]


REFUSED: list[tuple[Any, str]] = [
    (BeamSearchParams(beam_width=2), "cannot search with beams"),
    (greedy(repetition_penalty=1.1), "repetition_penalty needs the tokens before a token"),
    (greedy(structured_outputs={"regex": "a+"}, ignore_eos=False), "structured_outputs needs the tokens before"),
    (greedy(bad_token_sequences=[[3, 4]]), "bad_token_sequences of several tokens"),
    (greedy(prompt_logprobs=1), "prompt_logprobs needs"),
    (greedy(confidence_threshold=0.9, confidence_factor=1.0), "give one"),
    (greedy(confidence_factor=1.0, entropy_bound=0.1), "confidence_factor and entropy_bound all say"),
]


@pytest.mark.parametrize(("params", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_requests_that_cannot_work_are_refused(params: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        load(blocks(4)).generate([prompt(5)], params)


def test_other_requests_and_settings_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="the prompt has the mask token 2"):
        load(blocks(4)).generate([[5, MASK]], greedy())
    with pytest.raises(RequestError, match="a block of this model has 16 tokens"):
        load(blocks(16), max_num_batched_tokens=8)
    for options in (
        {"speculative": "ngram"},
        {"speculative": "ngram", "num_speculative_tokens": 2},
        {"steps_in_flight": 2},
    ):
        with pytest.raises(RequestError, match="diffusion model"):
            load(blocks(4), **options)
    with pytest.raises(RequestError, match="continuous batches only"):
        LLM(_folder(blocks(4)).name, batching="static")
    for bad in ({"denoising_passes": 0}, {"confidence_threshold": 1.5}, {"remasking": "none"}):
        with pytest.raises(RequestError, match=next(iter(bad))):
            greedy(**bad)
    write(model([Layer(FULL, MLP, NORM)], "plain"), tmp_path)
    with pytest.raises(RequestError, match="remasking needs a diffusion model"):
        LLM(str(tmp_path)).generate([prompt(5)], greedy(remasking="random"))


# ---- planted bugs ----------------------------------------------------------------------------------------------


@pytest.fixture
def bug(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Plant a bug by its name, after the right answers were computed."""
    alone(4, False)
    take, result, accept = denoiser.Denoiser.take, denoiser.Denoiser._result, BlockScheduler._accept

    def keep_noisy_rows(self: Any, seq: Any, work: Any, result: Any) -> Any:
        update = accept(self, seq, work, result)
        if update.tokens and not update.finished:
            seq.computed = seq.planned = seq.replay_from = seq.settled
        return update

    def noise_by_row(self: Any, logits: Any, work: Any) -> Any:
        self._row.noise = replace(self._row.noise, choice=work.row)
        return take(self, logits, work)

    def early_end(self: Any) -> Any:
        if self._open.tokens[-1] != MASK:  # the block's last token is known, others are not
            self._open.masks = []
        return result(self)

    planted: dict[str, Any] = {
        "rows of a noisy pass are final": (BlockScheduler, "_accept", keep_noisy_rows),
        "noise by the batch's row": (denoiser.Denoiser, "take", noise_by_row),
        "an end in a masked place": (denoiser.Denoiser, "_result", early_end),
    }
    monkeypatch.setattr(*planted[request.param])
    yield


BUGS = ["rows of a noisy pass are final", "noise by the batch's row", "an end in a masked place"]


@pytest.mark.parametrize("bug", BUGS, indirect=True)
def test_planted_bugs_are_seen(bug: None) -> None:
    assert served(blocks(4), PROMPTS) != alone(4, False)


def position_in_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries and keys are rotated by their index in the block."""
    positions = layout.Slices.positions
    monkeypatch.setattr(layout.Slices, "positions", lambda self: positions(self) % 4)


def next_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block sees the first tokens of the next one, wherever they are in the same step."""
    last = Blocks.last
    monkeypatch.setattr(Blocks, "last", lambda self, position: last(self, position) + 2)


@pytest.mark.parametrize("plant", [position_in_block, next_block])
def test_positions_and_sight_are_those_of_the_definition(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = blocks(4)
    wanted = denoise(spec, wide(random_weights(spec)), prompt(21), 18, 4)
    assert wanted.margin > MARGIN
    params = greedy(max_tokens=18)
    for device in ("cpu", "reference"):
        (got,) = LLM(_folder(spec).name, device=device).generate([prompt(21)], params)
        assert got.outputs[0].token_ids == wanted.tokens
    plant(monkeypatch)
    (got,) = LLM(_folder(spec).name, device="reference").generate([prompt(21)], params)
    assert got.outputs[0].token_ids != wanted.tokens


def test_a_mask_token_that_may_be_drawn_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the mask of the mask token, it is drawn: its logit is as large as others in a random model."""
    monkeypatch.setattr(denoiser.Edits, "apply", lambda self, scores, indices: None)
    drawn = SamplingParams(max_tokens=200, seed=1, temperature=3.0, ignore_eos=True, n=4, denoising_passes=1)
    (output,) = load(blocks(8)).generate([prompt(9)], drawn)
    assert any(MASK in answer.token_ids for answer in output.outputs)
