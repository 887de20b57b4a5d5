"""Train a small model on associative recall (MQAR, arXiv:2312.04927), and measure how often it is right.

A sequence has pairs of a key and a value, and then all keys again in another order, each with its value behind it. All
keys and values of a sequence are different, so a model that only knows which values there were is right once in
`pairs` times.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from ridgeline.ops.devices import open_table
from ridgeline.spec import ModelSpec
from ridgeline.train.module import LanguageModel
from ridgeline.train.optimizer import Optimizer

ROWS, WARMUP, DECAY, CLIP = 32, 20, 0.1, 1.0  # sequences of an update; then as in other recipes
FILTER = 0.5  # standard deviation of short filters: with that of matrices, 0.02, nothing passes them at first
MEASURED = 512  # sequences on which a trained model is measured
CHOICES = {"rows": ROWS, "warmup": WARMUP, "decay": DECAY, "clip": CLIP, "filter": FILTER, "measured": MEASURED}
Ints = np.ndarray[Any, np.dtype[np.int64]]


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
    rng, length = np.random.default_rng((seed, 0)), 4 * pairs
    with _one_thread():
        learner = LanguageModel(spec, open_table("reference"), length, seed=seed)
        _widen_filters(learner, seed)
        optimizer = Optimizer(learner.weights(), "adamw", DECAY)
        for update in range(updates):
            ids = sequences(rng, ROWS, pairs, spec.vocab_size)
            targets = np.full_like(ids, -1)
            targets[:, 2 * pairs : -1 : 2] = ids[:, 2 * pairs + 1 :: 2]
            loss = learner(*_flat(ids), torch.from_numpy(targets.ravel()))
            (loss / (ROWS * pairs)).backward()
            optimizer.step(rate * min(1.0, (update + 1) / WARMUP), CLIP)
        with torch.no_grad():
            ids = sequences(np.random.default_rng((seed, 1)), MEASURED, pairs, spec.vocab_size)
            rows = (np.arange(MEASURED)[:, None] * length + np.arange(2 * pairs, length, 2)).ravel()
            found = learner.logits(*_flat(ids), torch.from_numpy(rows)).argmax(1).numpy()
    return float((found == ids[:, 2 * pairs + 1 :: 2].ravel()).mean())


@contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _flat(ids: Ints) -> tuple[torch.Tensor, torch.Tensor, tuple[int, ...]]:
    """Return the ids, positions and lengths of a step that reads all sequences, end to end."""
    rows, length = ids.shape
    return torch.from_numpy(ids.ravel()), torch.arange(length).repeat(rows), (length,) * rows


@torch.no_grad()
def _widen_filters(learner: LanguageModel, seed: int) -> None:
    """Draw the filters of short convolutions again, with FILTER."""
    generator = torch.Generator().manual_seed(seed)
    for name, weight in learner.weights().items():
        if name.endswith(".conv.weight"):
            weight.copy_(torch.randn(weight.shape, generator=generator) * FILTER)
