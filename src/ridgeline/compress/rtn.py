"""Round to nearest, with observers that choose the range of each block of weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Literal

import numpy as np

from ridgeline.compress.grid import Floats, Grid, Tile, grid_of, grids, groups_of, quantized, search
from ridgeline.ops.arrays import QuantizedMatrix
from ridgeline.spec.quant import Format

Observer = Literal["min-max", "percentile", "mse"]
PERCENTILE = 99.9  # share of a block's numbers inside of the range of the percentile observer, in percent


def round_to_nearest(weight: Floats, format: Format, observer: Observer = "min-max") -> QuantizedMatrix:
    """Return a matrix [out, in] rounded to nearest.

    observer: how the range of each block is chosen. "min-max": its least and largest number. "percentile": the middle
    99.9 % of its numbers; larger ones are clipped. "mse": the share of its range with the least mean squared error.

    Raises ValueError for a number that is not finite.
    """
    return round_with(weight, grids(weight, format, partial(OBSERVERS[observer], format)))


def round_with(weight: Floats, grid: Grid) -> QuantizedMatrix:
    """Return a matrix [out, in] rounded to the numbers of a grid [out, groups]."""
    columns = groups_of(grid.format, weight.shape[1])
    codes = Grid(grid.format, grid.scale[:, columns], grid.zero[:, columns]).codes(weight)
    return quantized(grid, codes)


def _min_max(format: Format, tile: Tile) -> Grid:
    return grid_of(format, tile.weights.min(2), tile.weights.max(2))


def _percentile(format: Format, tile: Tile) -> Grid:
    rest = 100 - PERCENTILE
    low, high = np.percentile(tile.weights, (rest / 2, 100 - rest / 2), axis=2)
    return grid_of(format, low.astype(np.float32), high.astype(np.float32))


def _least_squares(format: Format, tile: Tile) -> Grid:
    return least_error(format, tile, np.ones((1, 1, 1), np.float32))


OBSERVERS: Mapping[Observer, Callable[[Format, Tile], Grid]] = {
    "min-max": _min_max, "percentile": _percentile, "mse": _least_squares,
}  # fmt: skip


def least_error(format: Format, tile: Tile, importance: Floats) -> Grid:
    """Return the grid whose squared errors, times the importance of each number, have the least sum in each block."""
    weights = tile.weights

    def error(every: Grid) -> Floats:
        return np.stack([one(every.at(i)) for i in range(len(every.scale))])

    def one(grid: Grid) -> Floats:
        wide = Grid(format, grid.scale[..., None], grid.zero[..., None])
        found: Floats = (importance * np.square(weights - wide.round(weights))).sum(2)
        return found

    return search(format, weights.min(2), weights.max(2), error)
