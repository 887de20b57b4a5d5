"""Generate the requests of a case from a seed: prompts, sampling parameters, arrivals."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ridgeline.runtime.generator import GenerationRequest
from ridgeline.sample.sampler import NoiseKey
from ridgeline.spec.request import SamplingParams
from ridgeline.verify.matrix import Case, Scale, lengths

GREEDY = SamplingParams(temperature=0, ignore_eos=True)
SAMPLED = SamplingParams(temperature=1, ignore_eos=True)
# Drawn from a few tokens only, so that tokens repeat and penalties have an effect.
PENALIZED = SamplingParams(
    temperature=1, top_p=0.9, repetition_penalty=1.5, presence_penalty=1, frequency_penalty=2, ignore_eos=True
)
# DRY finds repetitions in the prompt and the answer, and XTC draws at each token whether it acts.
REPEATING = SamplingParams(
    temperature=1, dry_multiplier=2, dry_allowed_length=1, xtc_probability=0.5, xtc_threshold=0.05, ignore_eos=True
)
KINDS = (GREEDY, SAMPLED, PENALIZED, REPEATING)
# Passes of a diffusion model: one token each; those that are sure, which later passes may replace; a fixed number of
# them; in a drawn order. In a case of preemption the second request still runs when the first one needs a page.
BLOCK_KINDS = (
    GREEDY,
    SamplingParams(temperature=0, confidence_threshold=0.3, edit_threshold=0.3, ignore_eos=True),
    SamplingParams(temperature=1, top_p=0.9, denoising_passes=2, ignore_eos=True),
    SamplingParams(temperature=1, remasking="random", denoising_passes=3, ignore_eos=True),
)
# Of models that see whole sequences: blocks within an answer, and guidance.
WHOLE_KINDS = (
    replace(GREEDY, block_length=3),
    BLOCK_KINDS[1],
    SamplingParams(temperature=1, top_p=0.9, denoising_passes=6, ignore_eos=True),
    SamplingParams(
        temperature=1, remasking="random", block_length=5, denoising_passes=2, cfg_scale=0.5, ignore_eos=True
    ),
)
# Of models with a canvas: numbers of passes, and how many tokens a pass keeps.
CANVAS_KINDS = (
    replace(GREEDY, denoising_passes=3),
    replace(GREEDY, denoising_passes=4, entropy_bound=2.0),
    SamplingParams(temperature=1, top_p=0.9, denoising_passes=2, ignore_eos=True),
    SamplingParams(temperature=1, entropy_bound=9.0, denoising_passes=3, ignore_eos=True),
)
NUM_ALLOWED = 16
DISTINCT = 12  # distinct requests of a large batch, each computed once by the baseline; a multiple of the kinds
TEXTS = (
    "Once upon a time, there was a little girl who lived in a small house near the forest. Every morning",
    "The capital of France is Paris. The capital of Japan is",
)


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request, and the step at which it arrives."""

    step: int
    request: GenerationRequest


@dataclass(frozen=True, slots=True)
class Round:
    """Requests that are served together, after the requests in `before` were served one after the other."""

    before: Sequence[GenerationRequest]
    arrivals: Sequence[Arrival]


@dataclass(slots=True)
class Prompts:
    """Generates prompts of random token ids, special tokens excluded, and of texts."""

    vocab_size: int
    special: Collection[int]
    seed: int
    texts: Sequence[Sequence[int]] = ()
    _ids: dict[tuple[int, int], tuple[int, ...]] = field(default_factory=dict)

    def tokens(self, index: int, length: int) -> tuple[int, ...]:
        """Return the first `length` tokens of random sequence `index`."""
        if (index, length) not in self._ids:
            plain = np.setdiff1d(np.arange(self.vocab_size), np.array(sorted(self.special), np.int64))
            rng = np.random.default_rng([self.seed, 2, index])
            self._ids[index, length] = tuple(plain[rng.integers(plain.size, size=length)].tolist())
        return self._ids[index, length]

    def text(self, index: int, length: int) -> tuple[int, ...]:
        """Return a text, cut to `length` tokens."""
        return tuple(self.texts[index % len(self.texts)][:length])


def params_of(request: GenerationRequest) -> SamplingParams:
    """Return the sampling parameters of a request; requests of this package never use beam search."""
    assert isinstance(request.params, SamplingParams)
    return request.params


def rounds(case: Case, scale: Scale, prompts: Prompts) -> Iterator[Round]:
    """Yield the requests of a case, one batch after the other, until every kind of request was served."""
    rng = np.random.default_rng([prompts.seed, 3, case.number])
    size = case.others + 1
    for first in range(0, len(KINDS), size):
        requests = [_request(case, scale, prompts, i) for i in range(first, first + size)]
        # Requests that are to run short of pages arrive together; answers of few passes would be over before others.
        span = (
            1
            if case.preempt
            else 2
            if scale.is_whole or scale.canvas
            else max(1, scale.new_tokens // (1 + case.drafts))
        )
        steps = [0, *rng.integers(span, size=size - 1).tolist()]
        before = _forerunners(case, scale, prompts) if case.prefix == "hit" and not first else []
        yield Round(before, list(map(Arrival, steps, requests)))


def _request(case: Case, scale: Scale, prompts: Prompts, number: int) -> GenerationRequest:
    """Return request `number` of a case. Where no prefix may be found, each request has its own cache salt."""
    index, found = number % DISTINCT, lengths(case, scale)
    length = found.prompts[index % len(found.prompts)]
    tokens = (*prompts.tokens(0, found.shared), *prompts.tokens(index + 1, length - found.shared))
    if case.text:
        tokens = prompts.text(number, length)
    kinds = _kinds(scale)
    params = replace(kinds[index % len(kinds)], n=case.n, max_tokens=scale.new_tokens)
    if params.presence_penalty or params.dry_multiplier:
        params = replace(params, allowed_token_ids=prompts.tokens(DISTINCT + 2, NUM_ALLOWED))
    noise = tuple(NoiseKey(prompts.seed, (index + 1) << 32 | choice) for choice in range(case.n))
    salt = "" if case.prefix == "hit" else str(number)
    return GenerationRequest(tokens, params, noise, cache_salt=salt)


def _kinds(scale: Scale) -> Sequence[SamplingParams]:
    """Return the parameters that requests take in turn."""
    if scale.canvas:
        return CANVAS_KINDS
    return KINDS if scale.block is None else WHOLE_KINDS if scale.is_whole else BLOCK_KINDS


def _forerunners(case: Case, scale: Scale, prompts: Prompts) -> list[GenerationRequest]:
    """Return requests that fill the prefix cache: some whose prefix differs in one token, then the prefix itself."""
    shared = prompts.tokens(0, lengths(case, scale).shared)
    other = prompts.tokens(DISTINCT + 1, len(shared))
    starts = [(*shared[:i], other[i], *shared[i + 1 :]) for i in sorted({0, len(shared) // 2, len(shared) - 1})]
    params, noise = replace(_kinds(scale)[0], max_tokens=1), (NoiseKey(prompts.seed, 0),)
    # The last token begins no other request, or they would share more; a tiny vocabulary may have no such token.
    taken = {prompts.tokens(i + 1, 1)[0] for i in range(DISTINCT)}
    last = next((token for token in prompts.tokens(DISTINCT + 3, 2 * DISTINCT) if token not in taken), other[0])
    return [GenerationRequest((*start, last), params, noise) for start in (*starts, shared)]
