"""Train a small model on the bytes of a text, and measure it on another one."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from ridgeline.spec import ModelSpec
from ridgeline.train import small
from ridgeline.train.optimizer import OptimizerName
from ridgeline.train.small import Ints, flat, one_thread, train_small

LENGTH, ROWS, MEASURED = 256, 4, 64  # bytes of a sequence, sequences of an update, sequences that are measured
OPTIMIZER: OptimizerName = "muon"  # in 150 updates it reached 1.61 nats a byte where AdamW had 1.96
CHOICES = {"length": LENGTH, "rows": ROWS, "optimizer": OPTIMIZER, "measured": MEASURED, **small.CHOICES}


def train_bytes(spec: ModelSpec, text: bytes, held_out: bytes, rate: float, updates: int, seed: int) -> float:
    """Train a model from random weights on bytes of `text`, and return its loss on `held_out` in nats a byte.

    rate: reached after a linear warm-up. Each text must have more than LENGTH bytes. One thread computes all, so
    that only the arguments decide the result.
    """
    with one_thread():
        learner = train_small(spec, _batches(text, updates, seed), LENGTH, OPTIMIZER, rate, seed)
        starts = np.linspace(0, len(held_out) - LENGTH - 1, MEASURED).astype(np.int64)
        total = 0.0
        with torch.no_grad():
            for rows in starts.reshape(-1, ROWS):
                ids, targets = _sequences(held_out, rows)
                total += float(learner(*flat(ids), torch.from_numpy(targets.ravel())))
    return total / (MEASURED * LENGTH)


def _batches(text: bytes, updates: int, seed: int) -> Iterator[tuple[Ints, Ints]]:
    rng = np.random.default_rng((seed, 0))
    for _ in range(updates):
        yield _sequences(text, rng.integers(0, len(text) - LENGTH, ROWS))


def _sequences(text: bytes, starts: Ints) -> tuple[Ints, Ints]:
    """Return the bytes from each start on, and the bytes that follow them, both [rows, LENGTH]."""
    data = np.frombuffer(text, np.uint8)
    both = data[starts[:, None] + np.arange(LENGTH + 1)].astype(np.int64)
    return both[:, :-1], both[:, 1:]
