"""Round to nearest with clipped ranges that are chosen by the importance of inputs, and nothing else."""

from __future__ import annotations

import numpy as np

from ridgeline.compress.grid import Floats, Grid, Tile, grids, search
from ridgeline.compress.rows import by_rows
from ridgeline.compress.rtn import least_error, round_with
from ridgeline.ops.arrays import QuantizedMatrix
from ridgeline.spec.quant import Format


def clip_by_importance(weight: Floats, importance: Floats, format: Format) -> QuantizedMatrix:
    """Return a matrix [out, in] rounded to nearest, with the range of each block chosen for the least weighted error.

    importance: [in], the mean square of each input, which weighs the squared errors of its column.
    """

    def choose(tile: Tile) -> Grid:
        return least_error(format, tile, tile.spread(importance))

    return round_with(weight, grids(weight, format, choose))


def clip_by_output(weight: Floats, hessian: Floats, format: Format, threads: int | None = None) -> QuantizedMatrix:
    """Return a matrix [out, in] rounded to nearest, with ranges chosen for the least error of each group's output.

    This is the clip search of AWQ (arXiv:2306.00978, auto_clip.py) with all calibration tokens: the error of a group of
    a row is d @ H @ d, where d are the errors of its weights and H [group, group] is its part of the Hessian.

    hessian: [in, in], the mean of x x^T over inputs x. threads: number of threads; None for one.
    """

    def some(rows: slice) -> QuantizedMatrix:
        own = weight[rows]
        return round_with(own, grids(own, format, lambda tile: _least_output_error(format, tile, hessian)))

    return by_rows(len(weight), some, threads) if format.rows == 1 else some(slice(None))


def _least_output_error(format: Format, tile: Tile, hessian: Floats) -> Grid:
    if format.rows != 1:
        return least_error(format, tile, tile.spread(np.diag(hessian)))
    weights = tile.weights  # [rows, groups, numbers of a group]
    along, wide = weights.shape[1:]
    own = hessian[tile.columns, tile.columns].reshape(along, wide, along, wide)
    parts = own[np.arange(along), :, np.arange(along)]  # [groups, wide, wide]

    def error(every: Grid) -> Floats:
        return np.stack([one(every.at(i)) for i in range(len(every.scale))])

    def one(grid: Grid) -> Floats:
        off = weights - Grid(format, grid.scale[..., None], grid.zero[..., None]).round(weights)
        by_group = off.swapaxes(0, 1)
        found: Floats = ((by_group @ parts) * by_group).sum(2).T
        return found

    return search(format, weights.min(2), weights.max(2), error)
