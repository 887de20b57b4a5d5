"""Matrices that a checkpoint stores as codes: what their headers say, and how their arrays are read and cut."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ridgeline.ops.api import BY_ROW, QuantizedMatrix
from ridgeline.spec.quant import NUMBERS, Format, coded_bytes

Ndarray = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class Stored:
    """A matrix, or a stack of matrices, as the headers of a checkpoint describe it.

    Attributes:
        format: the format of every matrix.
        shape: [out, in], or [experts, out, in] for a stack.
        parts: names of the tensors that it consists of.
        read: reads the matrix with an index, 0 where there is only one. Its arrays are in host memory. It raises
            CheckpointError for values that the format cannot have.
    """

    format: Format
    shape: tuple[int, ...]
    parts: tuple[str, ...]
    read: Callable[[int], QuantizedMatrix]

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the arrays that `read` returns, without permutations."""
        *stack, rows, columns = self.shape
        return int(np.prod(stack, dtype=np.int64)) * coded_bytes(self.format, rows, columns)


def cut_format(format: Format, rows: Ndarray) -> Format:
    """Return the format of some rows of a matrix. Blocks that the cut does not follow become groups of each row."""
    if format.rows <= 1:
        return format
    blocks = rows // format.rows
    first = np.repeat(blocks[:: format.rows], format.rows)[: len(blocks)]
    return format if np.array_equal(blocks, first) else replace(format, rows=1)


def cut_rows(matrix: QuantizedMatrix, rows: Ndarray) -> QuantizedMatrix:
    """Return some rows of a matrix whose arrays are in host memory, as views where rows are neighbors."""
    if len(rows) == matrix.shape[0] and np.array_equal(rows, np.arange(len(rows))):
        return matrix
    neighbors = len(rows) > 0 and np.array_equal(rows, np.arange(rows[0], rows[0] + len(rows)))
    index: Any = slice(int(rows[0]), int(rows[0]) + len(rows)) if neighbors else rows
    return replace(matrix.rows(index), format=cut_format(matrix.format, rows))


def join_rows(matrices: Sequence[QuantizedMatrix], positions: Sequence[Ndarray], rows: int) -> QuantizedMatrix:
    """Return one matrix [rows, in] whose rows `positions[i]` are those of `matrices[i]`: the inverse of `cut_rows`.

    Raises ValueError for matrices that differ in format, order of columns or scale of the input.
    """
    first = matrices[0]
    for other in matrices[1:]:
        same = other.format == first.format and other.input_scale == first.input_scale
        orders = [None if m.permutation is None else np.asarray(m.permutation).tolist() for m in (first, other)]
        if not same or orders[0] != orders[1]:
            raise ValueError("matrices that share a tensor have different formats, orders of columns or input scales")
    joined: dict[str, Any] = {}
    for name in BY_ROW:
        parts: list[Any] = [getattr(m, name) for m in matrices]
        if parts[0] is not None:
            joined[name] = np.empty((rows, parts[0].shape[1]), parts[0].dtype)
            for part, place in zip(parts, positions, strict=True):
                joined[name][place] = part
    return replace(first, **joined)


def dequantized(matrix: QuantizedMatrix) -> Ndarray:
    """Return the numbers of a matrix whose arrays are in host memory, float32 [out, in]."""
    m: Any = matrix
    levels, columns = NUMBERS[m.format.numbers].levels, m.shape[1]
    group = np.arange(columns) // (m.format.group or columns)
    wide: Ndarray = np.array(levels, np.float32)[m.codes] if levels else m.codes.astype(np.float32)
    if m.zero_points is not None:
        wide -= m.zero_points[:, group]
    wide *= _of_groups(m.format, m.scales, m.factors)[:, group]
    if m.minimums is not None:
        wide -= _of_groups(m.format, m.minimums, m.min_factors)[:, group]
    if m.permutation is None:
        return wide
    out = np.empty_like(wide)
    out[:, m.permutation] = wide
    return out


def _of_groups(format: Format, numbers: Ndarray, factors: Ndarray | None) -> Ndarray:
    """Return the scales or minimums of groups, from those of groups, or of blocks with factors."""
    if factors is None:
        return numbers
    of_blocks = np.repeat(numbers, format.block // format.group, axis=1)[:, : factors.shape[1]]
    return of_blocks * factors.astype(np.float32)
