"""Train a small model on associative recall (MQAR, arXiv:2312.04927), or to tell the first token of a sequence, and
measure how often it is right.

A sequence of MQAR has pairs of a key and a value, and then all keys again in another order, each with its value
behind it. All keys and values of a sequence are different, so a model that only knows which values there were is right
once in `pairs` times.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from ridgeline.spec import ModelSpec
from ridgeline.train import small
from ridgeline.train.small import Ints, flat, one_thread, train_small

ROWS, MEASURED = 32, 512  # sequences of an update, and those on which a trained model is measured
CHOICES = {"rows": ROWS, "measured": MEASURED, **small.CHOICES}


def sequences(rng: np.random.Generator, rows: int, pairs: int, vocab: int) -> Ints:
    """Return the ids [rows, 4 * pairs] of sequences: pairs, then the keys in another order with their values."""
    both = rng.permuted(np.tile(np.arange(vocab), (rows, 1)), axis=1)[:, : 2 * pairs].reshape(rows, pairs, 2)
    order = rng.permuted(np.tile(np.arange(pairs), (rows, 1)), axis=1)
    again = np.take_along_axis(both, order[:, :, None], 1)
    return np.concatenate([both.reshape(rows, -1), again.reshape(rows, -1)], axis=1)


def train_recall(spec: ModelSpec, pairs: int, rate: float, updates: int, seed: int) -> float:
    """Train a model from random weights, and return the share of queries whose value is its most likely token.

    rate: AdamW's rate, after a linear warm-up. One thread computes all, so that only the arguments
    decide the result.
    """
    length = 4 * pairs
    with one_thread():
        learner = train_small(spec, _batches(pairs, spec.vocab_size, updates, seed), length, "adamw", rate, seed)
        with torch.no_grad():
            ids = sequences(np.random.default_rng((seed, 1)), MEASURED, pairs, spec.vocab_size)
            rows = (np.arange(MEASURED)[:, None] * length + np.arange(2 * pairs, length, 2)).ravel()
            found = learner.logits(*flat(ids), torch.from_numpy(rows)).argmax(1).numpy()
    return float((found == ids[:, 2 * pairs + 1 :: 2].ravel()).mean())


def _batches(pairs: int, vocab: int, updates: int, seed: int) -> Iterator[tuple[Ints, Ints]]:
    """Yield the sequences of each update, of which only the values behind the second keys are trained."""
    rng = np.random.default_rng((seed, 0))
    for _ in range(updates):
        ids = sequences(rng, ROWS, pairs, vocab)
        targets = np.full_like(ids, -1)
        targets[:, 2 * pairs : -1 : 2] = ids[:, 2 * pairs + 1 :: 2]
        yield ids, targets


def first_tokens(rng: np.random.Generator, rows: int, length: int, vocab: int) -> tuple[Ints, Ints]:
    """Return ids and targets [rows, length] of sequences whose last token asks for the first one.

    The first token is of the lower half of the vocabulary, and all others are of the upper half.
    """
    ids = rng.integers(vocab // 2, vocab, (rows, length))
    ids[:, 0] = rng.integers(0, vocab // 2, rows)
    targets = np.full_like(ids, -1)
    targets[:, -1] = ids[:, 0]
    return ids, targets


def train_first(spec: ModelSpec, length: int, rate: float, updates: int, seed: int) -> float:
    """Train a model from random weights, and return how often its most likely token at the end is the first one.

    rate, and what decides the result: as in `train_recall`.
    """
    rng = np.random.default_rng((seed, 0))
    batches = (first_tokens(rng, ROWS, length, spec.vocab_size) for _ in range(updates))
    with one_thread():
        learner = train_small(spec, batches, length, "adamw", rate, seed)
        with torch.no_grad():
            ids, _ = first_tokens(np.random.default_rng((seed, 1)), MEASURED, length, spec.vocab_size)
            last = np.arange(length - 1, MEASURED * length, length)
            found = learner.logits(*flat(ids), torch.from_numpy(last)).argmax(1).numpy()
    return float((found == ids[:, 0]).mean())
