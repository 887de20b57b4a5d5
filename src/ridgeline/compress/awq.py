"""AWQ (arXiv:2306.00978): scale input channels so that the weights of large inputs lose less, then clip."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from ridgeline.compress.grid import Floats, Ints
from ridgeline.compress.rtn import round_to_nearest
from ridgeline.load.stored import dequantized
from ridgeline.spec.quant import Format

GRID = 20  # exponents that the search tries: 0, 1/20, ..., 19/20
FINALISTS = 4  # exponents that are compared on all tokens, where the search begins with few
LEAST = 1e-4  # the smallest scale before normalization, as in the published search

Loss = Callable[[Floats], float]  # scales [in] -> error of what the matrices are part of


class Search(NamedTuple):
    """The result of a search.

    losses: the error at each exponent, of which the first one is that without scales; infinite for those that were left
    out after the first tokens.
    """

    scales: Floats
    exponent: float
    losses: tuple[float, ...]


def channel_scales(mean_abs: Floats, exponent: float) -> Floats:
    """Return the scales of input channels [in] at an exponent: mean_abs ** exponent, around 1.

    mean_abs: [in], the mean of |x| of each input channel.
    """
    scales = np.maximum(mean_abs.astype(np.float64) ** exponent, LEAST)
    found: Floats = (scales / np.sqrt(scales.max() * scales.min())).astype(np.float32)
    return found


def search_scales(mean_abs: Floats, loss: Loss, rest: Loss | None = None) -> Search:
    """Return the scales of input channels with the least loss, over a grid of exponents.

    The matrices are multiplied with the scales by column, and their inputs divided by them.
    loss: returns the error of the output for scales [in]. If it is never finite, scales are 1. rest: returns the error
    on further tokens, and is called for the `FINALISTS` best exponents only.
    """
    losses = [loss(channel_scales(mean_abs, i / GRID)) for i in range(GRID)]
    if rest is not None:
        order = np.argsort(np.where(np.isfinite(losses), losses, np.inf), kind="stable")
        finalists = {int(i) for i in order[:FINALISTS]}
        losses = [
            each + rest(channel_scales(mean_abs, i / GRID)) if i in finalists else np.inf
            for i, each in enumerate(losses)
        ]
    best = int(np.argmin(np.where(np.isfinite(losses), losses, np.inf)))
    return Search(channel_scales(mean_abs, best / GRID), best / GRID, tuple(losses))


def output_loss(weights: Sequence[Floats], hessian: Floats, format: Format) -> Loss:
    """Return the loss of scales for matrices [out, in] that read one input: the mean squared error of their outputs.

    hessian: [in, in], the mean of x x^T over inputs x. Matrices are rounded to nearest after they are scaled.
    """

    def loss(scales: Floats) -> float:
        return sum(_output_error(weight, scaled_rounding(weight, scales, format), hessian) for weight in weights)

    return loss


def scaled_rounding(weight: Floats, scales: Floats, format: Format) -> Floats:
    """Return the matrix [out, in] that a matrix becomes if its columns are scaled, rounded and scaled back."""
    return dequantized(round_to_nearest(weight * scales, format)) / scales


def _output_error(weight: Floats, other: Floats, hessian: Floats) -> float:
    off = other - weight
    return float(((off @ hessian) * off).sum())


class Columns(NamedTuple):
    """Columns of a matrix that are stored as numbers of 16 bits: their indices [n], and values [out, n], float16."""

    indices: Ints
    values: Floats

    def replace_in(self, matrix: Floats) -> None:
        """Replace the columns of a matrix [out, in]."""
        matrix[:, self.indices] = self.values


def num_kept(share: float, columns: int) -> int:
    """Return how many columns a share is; at least one."""
    return max(1, round(share * columns))


def kept_columns(weight: Floats, mean_abs: Floats, share: float) -> Columns:
    """Return the columns of a matrix [out, in] with the largest inputs, in 16 bits.

    This is the first form of AWQ (section 3.1 of the paper), a baseline: all other columns are rounded to nearest, and
    no format of quantized checkpoints can store such a matrix.

    mean_abs: [in], the mean of |x| of each input channel. Raises ValueError for a column that float16 cannot hold.
    """
    kept = np.sort(np.argsort(-mean_abs, kind="stable")[: num_kept(share, weight.shape[1])])
    with np.errstate(over="ignore"):
        values = weight[:, kept].astype(np.float16)
    if not np.isfinite(values).all():
        raise ValueError("a column that stays in 16 bits has a number that float16 cannot hold")
    return Columns(kept, values)
