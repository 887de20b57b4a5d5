"""Measure a block diffusion model on held-out text: a bound of its bits per byte, beside those of another model."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch

from ridgeline.evals.estimates import Estimate, clustered_mean
from ridgeline.train.data.batches import Batch
from ridgeline.train.masked import BlockDenoising
from ridgeline.train.module import LanguageModel


@torch.no_grad()
def measure_bound(
    objective: BlockDenoising, size: int, rows: Sequence[Batch], bytes_per_token: float,
    on_tokens: Callable[[int], None],
) -> Estimate:  # fmt: skip
    """Return an upper bound of the bits per byte with blocks of `size` tokens; its error counts texts and masks.

    rows: batches of one row each. bytes_per_token: mean of the held-out text. on_tokens: gets numbers of tokens.
    """
    generator = torch.Generator().manual_seed(0)

    def nats(row: Batch) -> float:
        ids, targets = torch.from_numpy(row.token_ids), torch.from_numpy(row.targets)
        return float(objective.bound(size, ids, row.lengths, targets, generator))

    return _bits(nats, rows, bytes_per_token, on_tokens)


@torch.no_grad()
def measure_model(
    model: LanguageModel, rows: Sequence[Batch], bytes_per_token: float, on_tokens: Callable[[int], None]
) -> Estimate:
    """Return the bits per byte of an autoregressive model on the same rows."""

    def nats(row: Batch) -> float:
        ids, positions, targets = (torch.from_numpy(x) for x in (row.token_ids, row.positions, row.targets))
        return float(model(ids, positions, row.lengths, targets))

    return _bits(nats, rows, bytes_per_token, on_tokens)


def _bits(
    nats: Callable[[Batch], float], rows: Sequence[Batch], bytes_per_token: float, on_tokens: Callable[[int], None]
) -> Estimate:
    """Return the bits per byte of rows whose loss is `nats`."""
    sums: list[float] = []
    for row in rows:
        sums.append(nats(row))
        on_tokens(len(row.token_ids))
    counts = np.array([int((row.targets >= 0).sum()) for row in rows])
    return clustered_mean(np.array(sums), counts).scaled(1.0 / (bytes_per_token * math.log(2)))
