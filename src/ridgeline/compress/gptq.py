"""GPTQ (arXiv:2210.17323): round column by column, and let the columns that follow make up for each error."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from ridgeline.compress.grid import Floats, Grid, Ints, grid_of, grids, quantized, search
from ridgeline.compress.rows import by_rows
from ridgeline.compress.rtn import least_error
from ridgeline.ops.arrays import QuantizedMatrix
from ridgeline.spec.quant import Format

SPAN = 128  # columns whose errors are applied to later columns in one product
DAMPING = 0.01  # share of the mean of the Hessian's diagonal that is added to the diagonal


class GPTQ(NamedTuple):
    """Options of GPTQ.

    act_order: round the columns with the largest inputs first. clip: choose the range of each group for the least
    error, instead of from its least to its largest number. static: choose the scales of groups before the first column
    is rounded, for neighboring columns, so that the result has no permutation. damping: see DAMPING.
    """

    act_order: bool = True
    clip: bool = False
    static: bool = False
    damping: float = DAMPING


class Feedback(NamedTuple):
    """A Hessian, the order of its columns and U of `inverse_factor` in this order, for all matrices of one input."""

    hessian: Floats
    order: Ints
    factor: Floats


def feedback_of(hessian: Floats, options: GPTQ) -> Feedback:
    """Return the order and the factor of a Hessian [in, in], the mean of x x^T over inputs x."""
    order = np.argsort(-np.diag(hessian), kind="stable") if options.act_order else np.arange(len(hessian))
    return Feedback(hessian, order, inverse_factor(hessian[np.ix_(order, order)], options.damping))


def gptq(
    weight: Floats, inputs: Floats | Feedback, format: Format, options: GPTQ = GPTQ(), threads: int | None = None,  # noqa: B008
) -> QuantizedMatrix:  # fmt: skip
    """Return a matrix [out, in] whose product with the inputs of the Hessian differs little from the original.

    With act-order and scales by group, groups are of neighbors in the order of rounding, and the result has that order
    as its permutation, unless scales are static.

    inputs: the Hessian, or what `feedback_of` returned for it and the same options. threads: number of threads, None
    for one. Raises ValueError for numbers that are not finite.
    """
    shared = inputs if isinstance(inputs, Feedback) else feedback_of(inputs, options)
    is_static = options.static or format.rows != 1 or not format.group
    grid = _static(weight, shared.hessian, format, clip=options.clip) if is_static else None

    def some(rows: slice) -> QuantizedMatrix:
        run = _Run(weight[rows][:, shared.order].astype(np.float32), shared.factor, format, options.clip)
        if grid is not None:
            run.take(grid.at(rows), shared.order)
        run.round()
        is_permuted = options.act_order and not run.is_static
        codes = run.codes if is_permuted else run.codes[:, np.argsort(shared.order)]
        return quantized(run.grid, codes, shared.order if is_permuted else None)

    return by_rows(len(weight), some, threads)


def inverse_factor(hessian: Floats, damping: float) -> Floats:
    """Return U [in, in], upper triangular, with U^T U the inverse of the damped Hessian, in float32.

    An input that is always 0 has a row and a column of 0. Its diagonal becomes 1 there, so that its weights are
    rounded to nearest.
    """
    damped = hessian.astype(np.float64)
    mean = float(np.diag(damped).mean())
    diagonal = np.einsum("ii->i", damped)
    diagonal[diagonal <= 0] = mean or 1.0
    diagonal += damping * mean
    # With the order of rows and columns reversed: H = L L^T, so that H^-1 = L^-T L^-1, where L^-1 reversed is upper.
    lower = np.linalg.cholesky(damped[::-1, ::-1])
    return inverse_lower(lower)[::-1, ::-1].astype(np.float32)


def inverse_lower(lower: Floats) -> Floats:
    """Return the inverse of a lower triangular matrix, in a sixth of the operations that a full matrix takes."""
    size = len(lower)
    if size <= SPAN:
        return np.tril(np.linalg.inv(lower))
    half = size // 2
    above, below = inverse_lower(lower[:half, :half]), inverse_lower(lower[half:, half:])
    out = np.zeros_like(lower)
    out[:half, :half], out[half:, half:] = above, below
    out[half:, :half] = -(below @ lower[half:, :half]) @ above
    return out


def _static(weight: Floats, hessian: Floats, format: Format, *, clip: bool) -> Grid:
    """Return the grid [out, groups] of the original weights."""
    if clip:
        importance = np.diag(hessian)
        return grids(weight, format, lambda tile: least_error(format, tile, tile.spread(importance)))
    return grids(weight, format, lambda tile: grid_of(format, tile.weights.min(2), tile.weights.max(2)))


class _Run:
    """The state of one matrix: weights that are still to be rounded, and codes so far.

    Attributes:
        grid: scale and zero [out, groups].
        codes: [out, in], in the order of rounding.
    """

    def __init__(self, weight: Floats, factor: Floats, format: Format, clip: bool) -> None:
        self._weight, self._factor, self._format, self._clip = weight, factor, format, clip
        rows, columns = weight.shape
        shape = (rows, format.num_groups(columns))
        self.grid = Grid(format, np.ones(shape, np.float32), np.zeros(shape, np.float32))
        self.codes = np.empty((rows, columns), np.float32)
        self.is_static = False
        self._groups: Ints = np.arange(columns) // (format.group or columns)

    def take(self, grid: Grid, order: Ints) -> None:
        """Use scales that were chosen before, for groups of neighboring columns."""
        self.grid, self.is_static, self._groups = grid, True, self._groups[order]

    def round(self) -> None:
        """Round all columns."""
        for start, stop in self._spans():
            errors = self._round_span(start, stop)
            self._weight[:, stop:] -= errors @ self._factor[start:stop, stop:]

    def _spans(self) -> Iterator[tuple[int, int]]:
        """Yield ranges of columns, at most `SPAN` each, of which one begins wherever a longer group does."""
        columns, group = self._weight.shape[1], self._format.group
        whole = columns if self.is_static or not group else group if group > SPAN else SPAN // group * group
        for begin in range(0, columns, whole):
            end = min(begin + whole, columns)
            for start in range(begin, end, SPAN):
                yield start, min(start + SPAN, end)

    def _round_span(self, start: int, stop: int) -> Floats:
        """Round the columns of a span. Return the error of each, divided by its diagonal element: [out, columns]."""
        weight, factor = self._weight[:, start:stop], self._factor[start:stop, start:stop]
        errors = np.empty_like(weight)
        for i in range(stop - start):
            group = self._groups[start + i]
            if not self.is_static and (start + i) % self._format.group == 0:
                self._choose(group, start + i)
            grid = self.grid.at((slice(None), group))
            codes = grid.codes(weight[:, i])
            errors[:, i] = (weight[:, i] - grid.numbers(codes)) / factor[i, i]
            weight[:, i + 1 :] -= np.outer(errors[:, i], factor[i, i + 1 :])
            self.codes[:, start + i] = codes
        return errors

    def _choose(self, group: int, start: int) -> None:
        """Choose the scale of a group of columns from its weights as they are now."""
        stop = min(start + self._format.group, self._weight.shape[1])
        weight, factor = self._weight[:, start:stop], self._factor[start:stop, start:stop]
        low, high = weight.min(1), weight.max(1)
        found = grid_of(self._format, low, high)
        if self._clip:
            found = search(self._format, low, high, lambda grid: group_error(weight, factor, grid))
        self.grid.scale[:, group], self.grid.zero[:, group] = found.scale, found.zero


def group_error(weight: Floats, factor: Floats, grid: Grid) -> Floats:
    """Return the error of the output that rounding a group of columns adds, for each row: what GPTQ makes least.

    weight: [out, columns]; factor: the group's part of U; grid: scale and zero [candidates, out]. The result is
    [candidates, out].
    """
    # Columns come first, so that each one is a contiguous array.
    left = np.repeat(weight.T[:, None], len(grid.scale), 1)
    total = np.zeros(grid.scale.shape, np.float32)
    for i, row in enumerate(factor):
        error = (left[i] - grid.round(left[i])) / row[i]
        left[i + 1 :] -= row[i + 1 :, None, None] * error
        total += np.square(error)
    return total
