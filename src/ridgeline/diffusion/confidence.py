"""Score the predictions of a pass: the surest ones are kept first. One function for each way.

A function gets the log probabilities of one masked position [vocabulary], float64, the token that was drawn for it, and
a number in [0, 1) of its own noise. Larger results are surer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from ridgeline.sample.logits import Floats
from ridgeline.spec.request import Remasking

Confidence = Callable[[Floats, int, float], float]


def low_confidence(logprobs: Floats, token: int, uniform: float) -> float:
    """Return the probability of the token: the least likely ones are masked again (LLaDA, arXiv:2502.09992)."""
    return float(np.exp(logprobs[token]))


def random(logprobs: Floats, token: int, uniform: float) -> float:
    """Return the noise: positions are kept in a random order (MDLM, arXiv:2406.07524)."""
    return uniform


def top_margin(logprobs: Floats, token: int, uniform: float) -> float:
    """Return the probability of the best token less that of the second (arXiv:2502.06768)."""
    if logprobs.size == 1:
        return 1.0
    second, first = np.exp(np.partition(logprobs, -2)[-2:])
    return float(first - second)


def entropy(logprobs: Floats, token: int, uniform: float) -> float:
    """Return the negative entropy of the distribution, in nats (Dream)."""
    held = logprobs[logprobs > -np.inf]
    return float((np.exp(held) * held).sum())


CONFIDENCES: Mapping[Remasking, Confidence] = {
    "low_confidence": low_confidence,
    "random": random,
    "top_margin": top_margin,
    "entropy": entropy,
}
