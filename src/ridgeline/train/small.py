"""Train small models for some core-seconds, on one thread, so that only the arguments decide the result."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from ridgeline.ops.devices import open_table
from ridgeline.spec import ModelSpec
from ridgeline.train.module import LanguageModel
from ridgeline.train.optimizer import Optimizer, OptimizerName

WARMUP, DECAY, CLIP = 20, 0.1, 1.0  # updates until the rate is reached; then as in other recipes
FILTER = 0.5  # standard deviation of short filters: with that of matrices, 0.02, nothing passes them at first
CHOICES = {"warmup": WARMUP, "decay": DECAY, "clip": CLIP, "filter": FILTER}
Ints = np.ndarray[Any, np.dtype[np.int64]]


def train_small(
    spec: ModelSpec, batches: Iterable[tuple[Ints, Ints]], length: int, optimizer: OptimizerName, rate: float, seed: int
) -> LanguageModel:
    """Train a model from random weights with one update for each batch.

    batches: ids and targets [rows, length] of each update; a negative target is not trained. rate: reached
    after a linear warm-up.
    """
    learner = LanguageModel(spec, open_table("reference"), length, seed=seed)
    _widen_filters(learner, seed)
    updater = Optimizer(learner.weights(), optimizer, DECAY)
    for update, (ids, targets) in enumerate(batches):
        loss = learner(*flat(ids), torch.from_numpy(targets.ravel()))
        (loss / int((targets >= 0).sum())).backward()
        updater.step(rate * min(1.0, (update + 1) / WARMUP), CLIP)
    return learner


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch compute on one thread meanwhile."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def flat(ids: Ints) -> tuple[torch.Tensor, torch.Tensor, tuple[int, ...]]:
    """Return the ids, positions and lengths of a step that reads the sequences [rows, length], end to end."""
    rows, length = ids.shape
    return torch.from_numpy(ids.ravel()), torch.arange(length).repeat(rows), (length,) * rows


@torch.no_grad()
def _widen_filters(learner: LanguageModel, seed: int) -> None:
    """Draw the filters of short convolutions again, with FILTER."""
    generator = torch.Generator().manual_seed(seed)
    for name, weight in learner.weights().items():
        if name.endswith(".conv.weight"):
            weight.copy_(torch.randn(weight.shape, generator=generator) * FILTER)
