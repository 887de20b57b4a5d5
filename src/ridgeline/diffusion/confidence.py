"""Score the predictions of a pass: the surest ones are kept first. One function for each way.

A function gets the laws of n positions, the token that was drawn for each, and a number in [0, 1) of its own noise for
each. Larger results are surer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from ridgeline.sample.logits import Floats
from ridgeline.spec.request import Remasking

Ints = np.ndarray[Any, np.dtype[np.int64]]


class Laws(NamedTuple):
    """Distributions over the vocabulary, a row for each of n positions.

    scores [n, vocabulary], float32: the largest of each row is 0. weights: e to the scores. totals [n], float64: sums
    of the weights. A row depends on its own logits alone.
    """

    scores: Floats
    weights: Floats
    totals: Floats

    @classmethod
    def of(cls, logits: Floats) -> Laws:
        """Return the laws of logits [n, vocabulary], float32, none of which is NaN or plus infinity."""
        scores = logits - logits.max(axis=1, keepdims=True)
        weights = np.exp(scores)
        return cls(scores, weights, weights.sum(axis=1, dtype=np.float64))

    def chances(self, tokens: Ints) -> Floats:
        """Return the probability of a token of each row, [n]."""
        found: Floats = self.weights[np.arange(len(tokens)), tokens] / self.totals
        return found


Confidence = Callable[[Laws, Ints, Floats], Floats]


def low_confidence(laws: Laws, tokens: Ints, uniforms: Floats) -> Floats:
    """Return the probabilities of the tokens: the least likely ones are masked again (LLaDA, arXiv:2502.09992)."""
    return laws.chances(tokens)


def random(laws: Laws, tokens: Ints, uniforms: Floats) -> Floats:
    """Return the noise: positions are kept in a random order (MDLM, arXiv:2406.07524)."""
    return uniforms


def top_margin(laws: Laws, tokens: Ints, uniforms: Floats) -> Floats:
    """Return the probability of the best token less that of the second (arXiv:2502.06768)."""
    if laws.weights.shape[1] == 1:
        return np.ones(len(laws.totals))
    best = np.partition(laws.weights, -2, axis=1)[:, -2:].astype(np.float64)
    margin: Floats = (best[:, 1] - best[:, 0]) / laws.totals
    return margin


def entropy(laws: Laws, tokens: Ints, uniforms: Floats) -> Floats:
    """Return the negative entropy of the distributions, in nats (Dream)."""
    products = np.multiply(laws.weights, laws.scores, out=np.zeros_like(laws.scores), where=laws.weights > 0)
    found: Floats = products.sum(axis=1, dtype=np.float64) / laws.totals - np.log(laws.totals)
    return found


CONFIDENCES: Mapping[Remasking, Confidence] = {
    "low_confidence": low_confidence,
    "random": random,
    "top_margin": top_margin,
    "entropy": entropy,
    "origin": random,  # each token has a chance of its own (commit.by_time), and no order
}
