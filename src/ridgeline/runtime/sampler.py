"""From one row of logits to one token, on the host.

Noise is counter-based: the number drawn for a token depends on the seed, the choice and the position alone, so a
neighbour in the batch, a restart or another order of work never changes it (Salmon et al. 2011, Philox).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ridgeline.spec.request import SamplingParams, TokenLogprobs

Floats = np.ndarray[Any, np.dtype[np.floating[Any]]]

PURPOSE_SAMPLE = 0  # other purposes (speculation, beams) will draw from other streams


@dataclass(frozen=True, slots=True)
class NoiseKey:
    """Which stream of noise an answer draws from: a seed, and the answer's number under that seed."""

    seed: int
    choice: int

    def uniform(self, position: int, purpose: int = PURPOSE_SAMPLE) -> float:
        """A number in [0, 1) for one position."""
        noise = np.random.Philox(key=[self.seed, self.choice], counter=[0, purpose, position, 0])
        return float(np.random.Generator(noise).random())


def pick(logits: Floats, params: SamplingParams, history: Sequence[int], noise: NoiseKey, position: int) -> int:
    """The next token for one sequence.

    logits [vocabulary], float32. history: the prompt and answer so far, for the repetition penalty. position: the
    place of the new token in the sequence.
    """
    scores = penalise(logits.astype(np.float64), history, params.repetition_penalty)
    if params.temperature == 0:
        return int(scores.argmax())  # the lowest id among equals
    with np.errstate(over="ignore"):  # a tiny temperature sends all but the best to minus infinity
        scores = (scores - scores.max()) / params.temperature
    probabilities = filter_probabilities(scores, params)
    return draw(probabilities, noise.uniform(position))


def penalise(scores: Floats, history: Sequence[int], penalty: float) -> Floats:
    """Scores of tokens that occurred are divided by the penalty if positive, multiplied if not (arXiv:1909.05858)."""
    if penalty == 1.0:
        return scores
    seen = np.unique(np.asarray(history, np.int64))
    scores = scores.copy()
    with np.errstate(over="ignore"):
        scores[seen] = np.where(scores[seen] > 0, scores[seen] / penalty, scores[seen] * penalty)
    limit = np.finfo(np.float64).max / 4  # so that differences of scores stay finite under absurd penalties
    return scores.clip(-limit, limit)


def filter_probabilities(scores: Floats, params: SamplingParams) -> Floats:
    """softmax, then top_k, top_p and min_p, each on what the one before left, renormalised at the end.

    Ties at a border go to the lower token id.
    """
    probabilities = softmax(scores)
    if not (params.top_k > 0 or params.top_p < 1 or params.min_p > 0):
        return probabilities
    order = np.argsort(-probabilities, kind="stable")
    kept = probabilities[order]
    count = min(params.top_k, kept.size) if params.top_k > 0 else kept.size
    kept = kept[:count] / kept[:count].sum()
    # The smallest set of tokens whose probability reaches top_p: all before the sum gets there, and one more.
    count = int(np.searchsorted(kept.cumsum(), params.top_p)) + 1 if params.top_p < 1 else count
    kept = kept[:count]
    kept = kept[kept >= params.min_p * kept[0]]
    out = np.zeros_like(probabilities)
    out[order[: kept.size]] = kept / kept.sum()
    return out


def draw(probabilities: Floats, uniform: float) -> int:
    """The token whose slice of [0, 1) holds `uniform`: slices in order of token id."""
    edges = probabilities.cumsum()
    token = int(np.searchsorted(edges, uniform * edges[-1], side="right"))
    return min(token, int(np.flatnonzero(probabilities)[-1]))


def softmax(scores: Floats) -> Floats:
    shifted = np.exp(scores - scores.max())
    out: Floats = shifted / shifted.sum()
    return out


def token_logprobs(logits: Floats, token: int, count: int) -> TokenLogprobs:
    """Log probabilities of `token` and of the `count` most likely tokens, from the unmodified distribution."""
    scores = logits.astype(np.float64)
    scores -= scores.max()
    scores -= np.log(np.exp(scores).sum())
    best = np.argsort(-scores, kind="stable")[:count]
    return TokenLogprobs(token, float(scores[token]), tuple((int(t), float(scores[t])) for t in best))
