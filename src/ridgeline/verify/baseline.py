"""Compute the answers that every case must give: by naive sampling over whole histories, or one at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from ridgeline.ops.noise import gumbel
from ridgeline.runtime.generator import GenerationRequest, Generator
from ridgeline.runtime.load import LoadedModel
from ridgeline.runtime.naive_blocks import NaiveBlocks, open_naive
from ridgeline.sample.filters import Uniform, filter_scores
from ridgeline.sample.logits import Floats
from ridgeline.sample.noise import PURPOSE_SAMPLE
from ridgeline.sample.sampler import NoiseKey, SampleRow
from ridgeline.spec import CanvasDiffusion
from ridgeline.spec.request import SamplingParams
from ridgeline.verify.canvases import AloneCanvases
from ridgeline.verify.requests import params_of

NEAR_LOGITS = 1e-4  # between two logits: the rounding of float32 products depends on the number of rows
NEAR_LIMIT = 1e-5  # probability between a token and the limit of a filter
NUDGES = 16  # times that an answer of a diffusion model is computed again with logits that are moved a little


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer. leads: for a greedy answer, how far each token's logit is above the second best one."""

    tokens: tuple[int, ...]
    leads: tuple[float, ...] = ()


class Baseline:
    """Computes answers with one model, each of them once: by naive sampling, or alone if the model has a canvas."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._loaded = loaded
        self._generator = AloneCanvases(loaded) if loaded.spec.canvas else open_naive(loaded)
        self._answers: dict[tuple[Sequence[int], SamplingParams, NoiseKey], Answer] = {}

    def answer(self, request: GenerationRequest, choice: int) -> Answer:
        """Return the answer that a choice of a request must get. Raises RequestError if there is none."""
        params, key = replace(params_of(request), n=1), request.noise[choice]
        if params.temperature == 0 and self._loaded.spec.diffusion is None:  # draws nothing
            params, key = replace(params, logprobs=2), NoiseKey(0, 0)
        cached = tuple(request.prompt_token_ids), params, key
        if cached not in self._answers:
            self._answers[cached] = self._compute(replace(request, params=params, noise=(key,)))
        return self._answers[cached]

    def smallest_lead(self) -> float | None:
        """Return the smallest lead of any greedy token so far over the second best one; None without greedy tokens."""
        return min((lead for answer in self._answers.values() for lead in answer.leads), default=None)

    def gap(self, request: GenerationRequest, choice: int, position: int, token: int) -> float | None:
        """Return how close `token`, which came at `position`, is to the expected token.

        Greedy: the difference of their logits. Sampled: how much its logit would have to rise for it to be drawn, where
        top_p and xtc_threshold may be off by NEAR_LIMIT; None for a token that the filters remove. Diffusion models:
        see `_nudged`.
        """
        if self._loaded.spec.diffusion is not None:
            return self._nudged(request, choice, position, token)
        answer, params = self.answer(request, choice), params_of(request)
        row = SampleRow.start(params, request.prompt_token_ids, request.noise[choice], (), answer.tokens[:position])
        prompt = request.prompt_token_ids
        logits = self._logits([*prompt, *answer.tokens[:position]], len(prompt))
        if row.edits is not None:
            row.edits.apply(logits)
        if params.temperature == 0:
            return float(logits[answer.tokens[position]] - logits[token])
        scores = (logits - logits.max()) / params.temperature
        noise = request.noise[choice]
        gumbels = gumbel(noise.key(row.position, PURPOSE_SAMPLE), np.arange(scores.size))
        uniform = partial(noise.uniform, row.position)
        found = [_distance(scores, each, uniform, gumbels, token) for each in _nearby(params)]
        return min((d * params.temperature for d in found if d is not None), default=None)

    def _nudged(self, request: GenerationRequest, choice: int, position: int, token: int) -> float | None:
        """Return a distance in logits that gives `token` in place of the expected one; None if none was found.

        A token of a diffusion model depends on which positions were kept in each pass before it. So the answer is
        computed again a few times, with all logits moved at random by as little as rounding may move them.
        """
        params = replace(params_of(request), n=1)
        wanted = (*self.answer(request, choice).tokens[:position], token)
        for seed in range(NUDGES):
            found = _run(self._moved(seed), replace(request, params=params, noise=(request.noise[choice],)))
            if found.tokens[: position + 1] == wanted:
                return NEAR_LOGITS / 2
        return None

    def _moved(self, seed: int) -> Generator:
        """Return a generator for the diffusion model whose logits are moved a little."""
        model, change = self._loaded.spec.diffusion, partial(_moved, np.random.default_rng(seed))
        assert model is not None
        if isinstance(model, CanvasDiffusion):
            return AloneCanvases(self._loaded, change)
        return NaiveBlocks(self._loaded, model, change)

    def _compute(self, request: GenerationRequest) -> Answer:
        return _run(self._generator, request)

    def _logits(self, tokens: Sequence[int], num_prompt: int) -> Floats:
        """Return the logits of the token after `tokens`: float64 [vocabulary]."""
        memory, model = self._loaded.table.memory, self._loaded.model
        step = self._loaded.dense_step([tokens], [num_prompt])
        return np.asarray(memory.get(model.logits(model.forward(step), step.last_rows(memory)))[0], np.float64)


def _moved(rng: np.random.Generator, logits: Floats) -> Floats:
    """Return logits that are moved at random, by at most half of NEAR_LOGITS."""
    by = rng.uniform(-NEAR_LOGITS / 2, NEAR_LOGITS / 2, logits.shape)
    return np.asarray(logits + by, logits.dtype)


def _run(generator: Generator, request: GenerationRequest) -> Answer:
    """Return the answer to one request. Raises RequestError if there is none."""
    tokens: list[int] = []
    leads: list[float] = []
    generator.add(0, request)
    while len(generator):
        for event in generator.step():
            if event.error is not None:
                raise event.error
            tokens += event.tokens
            leads += [e.top[0][1] - e.top[1][1] for e in event.logprobs if len(e.top) > 1]
    return Answer(tuple(tokens), tuple(leads))


def _nearby(params: SamplingParams) -> Iterator[SamplingParams]:
    """Yield the parameters, with each limit on probabilities as it is and off by NEAR_LIMIT."""
    for off in (0.0, -NEAR_LIMIT, NEAR_LIMIT):
        mass, threshold = params.top_p + off, params.xtc_threshold + off
        yield replace(
            params, top_p=min(max(mass, NEAR_LIMIT), 1.0), xtc_threshold=min(max(threshold, 0.0), 1.0)
        )  # fmt: skip


def is_near(gap: float | None) -> bool:
    """Return whether rounding can explain a difference."""
    return gap is not None and gap < NEAR_LOGITS


def _distance(scores: Floats, params: SamplingParams, uniform: Uniform, gumbels: Floats, token: int) -> float | None:
    """Return how far a token's sum of score and noise is below the largest one; None if the filters remove it."""
    kept = scores.copy()
    filter_scores(kept, params, uniform)
    if kept[token] == -np.inf:
        return None
    sums = kept + gumbels
    return float(sums.max() - sums[token])
