"""Fill texts of masked words in a few passes, with the exact law of each word, to see what parallel words cost.

A text has LENGTH of WORDS words in order, and all such texts are equally likely. Each pass draws a word for each masked
position by its own law, given the words of earlier passes, and keeps the surest ones, as the engine's decoder does.
Words of one pass do not know of each other. This is the only error, because the laws are exact and no model is trained.
"""

from __future__ import annotations

from itertools import combinations_with_replacement
from typing import Any

import numpy as np

from ridgeline.diffusion.commit import shares, surest

WORDS, LENGTH, DRAWN = 8, 8, 400
Ints = np.ndarray[Any, np.dtype[np.int64]]
Floats = np.ndarray[Any, np.dtype[np.float64]]


def texts_in_order() -> Ints:
    """Return all texts in order, [n, LENGTH]."""
    return np.array(list(combinations_with_replacement(range(WORDS), LENGTH)))


def laws(texts: Ints) -> Floats:
    """Return the probability of each word at each position among these texts, [LENGTH, WORDS]."""
    return np.stack([np.bincount(texts[:, at], minlength=WORDS) for at in range(LENGTH)]) / len(texts)


def share_in_order(passes: int, seed: int) -> float:
    """Return the share of DRAWN texts that are in order if each is filled in so many passes."""
    rng, texts = np.random.default_rng((seed, passes)), texts_in_order()
    return sum(_is_in_order(texts, passes, rng) for _ in range(DRAWN)) / DRAWN


def chance_of_one_pass() -> float:
    """Return by the law which share of texts is in order if one pass fills all positions."""
    texts = texts_in_order()
    return float(laws(texts)[np.arange(LENGTH), texts].prod(1).sum())


def _is_in_order(texts: Ints, passes: int, rng: np.random.Generator) -> bool:
    """Draw a text, and return whether it is in order. texts: all those in order."""
    masked = list(range(LENGTH))
    for count in shares(LENGTH, passes):
        law = laws(texts)[masked]
        words = [int(rng.choice(WORDS, p=own)) for own in law]
        for i in sorted(surest([law[i, word] for i, word in enumerate(words)], count), reverse=True):
            texts = texts[texts[:, masked.pop(i)] == words[i]]
        if not len(texts):
            return False
    return True
