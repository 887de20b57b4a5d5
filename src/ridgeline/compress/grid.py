"""The numbers that groups of weights can hold: scales and zero points of groups, codes of numbers, for any format."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from ridgeline.ops.arrays import QuantizedMatrix
from ridgeline.spec.quant import NUMBERS, Format, NumberType

Floats = np.ndarray[Any, np.dtype[np.floating[Any]]]
Ints = np.ndarray[Any, np.dtype[np.integer[Any]]]

LEAST_HALF = 2.0**-24  # the smallest positive float16: no scale of a group is less, so that every scale is positive
LEAST_FLOAT = 2.0**-100  # the same for scales in float32, whose inverse must be finite
SHRINKS = tuple(1 - i / 25 for i in range(17))  # shares of a group's range that a search tries, down to 0.36


@dataclass(frozen=True)
class Grid:
    """The numbers of groups: (code - zero point) x scale, or level x scale.

    scale, zero: arrays that broadcast with the weights. zero is 0 for formats without zero points.
    """

    format: Format
    scale: Floats
    zero: Floats

    def codes(self, weights: Floats) -> Floats:
        """Return the code of the nearest number for each weight, as floats."""
        numbers, scaled = NUMBERS[self.format.numbers], weights / self.scale
        if numbers.levels:
            return _nearest_level(self.format.numbers, scaled)
        # Symmetric int8 leaves out -128, as everywhere.
        is_even = self.format.numbers == "int8" and self.format.offsets == "none"
        return np.clip(np.rint(scaled) + self.zero, -numbers.high if is_even else numbers.low, numbers.high)

    def numbers(self, codes: Floats) -> Floats:
        """Return the number that each code stands for."""
        levels = NUMBERS[self.format.numbers].levels
        if levels:
            return np.array(levels, np.float32)[codes.astype(np.intp)] * self.scale
        return (codes - self.zero) * self.scale

    def round(self, weights: Floats) -> Floats:
        """Return the nearest number for each weight."""
        return self.numbers(self.codes(weights))

    def at(self, index: Any) -> Grid:
        """Return the grid of some of the groups."""
        return Grid(self.format, self.scale[index], self.zero[index])


@lru_cache
def _levels(name: NumberType) -> tuple[Floats, Ints, Floats]:
    """Return the finite levels of a type in rising order, their codes, and the numbers halfway between neighbors."""
    levels = np.array(NUMBERS[name].levels, np.float32)
    codes = np.flatnonzero(np.isfinite(levels))
    _, first = np.unique(levels[codes], return_index=True)
    codes = codes[first]
    sorted_levels = levels[codes]
    return sorted_levels, codes, (sorted_levels[1:] + sorted_levels[:-1]) / 2


def _nearest_level(name: NumberType, scaled: Floats) -> Floats:
    """Return the code of the nearest level; halfway between two, the one with an even code."""
    _, codes, middles = _levels(name)
    below = codes[np.searchsorted(middles, scaled, "left")]
    above = codes[np.searchsorted(middles, scaled, "right")]
    return np.where(below % 2 == 0, below, above).astype(np.float32)


def grid_of(format: Format, low: Floats, high: Floats) -> Grid:
    """Return the grid whose numbers reach from low to high. The number 0 is always among them.

    Scales are rounded to the type in which the format stores them. Raises ValueError for a format with minimums.
    """
    numbers = NUMBERS[format.numbers]
    if format.offsets == "minimums":
        raise ValueError(f"{format.name}: minimums are chosen by the writer of GGUF files, not by calibration")
    low, high = np.minimum(low, 0), np.maximum(high, 0)
    if format.offsets == "none":
        scale = _stored(format, np.maximum(-low, high) / numbers.steps)
        return Grid(format, scale, np.zeros_like(scale))
    scale = _stored(format, (high - low) / (numbers.high - numbers.low))
    return Grid(format, scale, np.clip(np.rint(numbers.low - low / scale), numbers.low, numbers.high))


def _stored(format: Format, scale: Floats) -> Floats:
    if format.scale_bits == 16:
        with np.errstate(over="ignore"):
            scale = scale.astype(np.float16)
        return np.maximum(scale.astype(np.float32), np.float32(LEAST_HALF))
    return np.maximum(scale.astype(np.float32), np.float32(LEAST_FLOAT))


def search(format: Format, low: Floats, high: Floats, error: Callable[[Grid], Floats]) -> Grid:
    """Return the grid with the least error in each group, among ranges that are shrunk by `SHRINKS`.

    Both ends are shrunk together. With zero points, each end is then shrunk alone.

    error: returns errors [candidates, ...] for grids with scale and zero [candidates, ...], where ... is the shape of
    low and high, the ends of the whole range of each group.
    """
    shares = np.array(SHRINKS, np.float32).reshape(-1, *(1,) * low.ndim)
    best_low, best_high = _best(format, low * shares, high * shares, error)
    if format.offsets == "zero_points":
        best_low, best_high = _best(format, low * shares, np.broadcast_to(best_high, (len(shares), *low.shape)), error)
        best_low, best_high = _best(format, np.broadcast_to(best_low, (len(shares), *low.shape)), high * shares, error)
    return grid_of(format, best_low, best_high)


def _best(format: Format, low: Floats, high: Floats, error: Callable[[Grid], Floats]) -> tuple[Floats, Floats]:
    """Return the ends with the least error out of those of each candidate, [candidates, ...]."""
    chosen = error(grid_of(format, low, high)).argmin(0)[None]
    return np.take_along_axis(low, chosen, 0)[0], np.take_along_axis(high, chosen, 0)[0]


class Tile(NamedTuple):
    """A part of a matrix whose blocks have one size: weights [blocks down, blocks across, numbers of a block]."""

    rows: slice
    groups: slice
    columns: slice
    weights: Floats

    def spread(self, across: Floats) -> Floats:
        """Return numbers of columns [in] in the order of a block's numbers: [1, blocks across, numbers of a block]."""
        own = across[self.columns].reshape(1, self.weights.shape[1], 1, -1)
        height = self.weights.shape[2] // own.shape[3]
        return np.broadcast_to(own, (*own.shape[:2], height, own.shape[3])).reshape(1, self.weights.shape[1], -1)


def tiles(weight: Floats, format: Format) -> Iterator[Tile]:
    """Yield the parts of a matrix [out, in] that consist of whole blocks, and of shorter ones at its ends.

    A block is all numbers that share a scale: a group of a row, a row, `rows` x `group` numbers, or the whole matrix.
    """
    out, across = weight.shape
    height, width = format.rows or out, format.group or across
    for rows, tall in _cut(out, height):
        for columns, wide in _cut(across, width):
            part = weight[rows, columns]
            down, along = part.shape[0] // tall, part.shape[1] // wide
            blocks = part.reshape(down, tall, along, wide).swapaxes(1, 2).reshape(down, along, tall * wide)
            yield Tile(rows, slice(columns.start // width, columns.start // width + along), columns, blocks)


def _cut(length: int, size: int) -> Iterator[tuple[slice, int]]:
    whole = length // size * size
    if whole:
        yield slice(0, whole), size
    if whole < length:
        yield slice(whole, length), length - whole


def grids(weight: Floats, format: Format, choose: Callable[[Tile], Grid]) -> Grid:
    """Return the grid of a matrix, scale and zero [out, groups], with `choose` called for each of its tiles."""
    shape = (weight.shape[0], format.num_groups(weight.shape[1]))
    scale, zero = np.empty(shape, np.float32), np.empty(shape, np.float32)
    for tile in tiles(weight, format):
        found = choose(tile)
        height = (tile.rows.stop - tile.rows.start) // len(tile.weights)
        scale[tile.rows, tile.groups] = np.repeat(found.scale, height, 0)
        zero[tile.rows, tile.groups] = np.repeat(found.zero, height, 0)
    return Grid(format, scale, zero)


def groups_of(format: Format, columns: int) -> Ints:
    """Return the group of each column, [in]."""
    return np.arange(columns) // (format.group or columns)


def quantized(grid: Grid, codes: Floats, permutation: Ints | None = None) -> QuantizedMatrix:
    """Return a matrix of codes [out, in] with scales and zero points [out, groups].

    Raises ValueError if a scale is not finite.
    """
    if not np.isfinite(grid.scale).all():
        raise ValueError(f"a weight is not finite, or too large for {grid.format.name}")
    kind = np.uint8 if NUMBERS[grid.format.numbers].levels else np.int8
    zero_points = grid.zero.astype(np.int8) if grid.format.offsets == "zero_points" else None
    return QuantizedMatrix(
        grid.format, codes.astype(kind), grid.scale.astype(np.float32), zero_points, permutation=permutation
    )
