"""Arrays of a backend's library, and matrices as codes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from ridgeline.spec.quant import Format

# The arrays of a quantized matrix: those with a row for each row of the matrix, and all.
BY_ROW = ("codes", "scales", "zero_points", "minimums", "factors", "min_factors")
ARRAYS = (*BY_ROW, "permutation")


class Array(Protocol):
    """An array of the backend's library. Only ops access its elements."""

    @property
    def shape(self) -> tuple[int, ...]: ...


@dataclass(frozen=True, eq=False)
class QuantizedMatrix:
    """A matrix [out, in] as codes. `format` says how many neighbors make a group.

    With the scale, the zero point and the minimum of its group, number (i, j) is (codes[i, j] - zero point) x scale for
    whole numbers, levels[codes[i, j]] x scale for other types, and less the minimum where there is one. Absent zero
    points and minimums are 0.

    Where the format has blocks of columns, scales and minimums are those of blocks. A group multiplies them with its
    factors, which float32 holds exactly.
    """

    format: Format
    codes: Array  # [out, in], int8; uint8 for levels, and for whole numbers with minimums
    scales: Array  # [out, groups], float32; rows that share scales have equal ones
    zero_points: Array | None = None  # [out, groups], int8
    permutation: Array | None = None  # [in], integers: column j multiplies element permutation[j] of the input
    minimums: Array | None = None  # [out, groups], float32
    input_scale: float | None = None  # activations are rounded with this scale; None: with the scale of each token
    factors: Array | None = None  # [out, groups], int8, with blocks
    min_factors: Array | None = None  # [out, groups], int8, with blocks and minimums

    def __post_init__(self) -> None:
        rows, columns = self.codes.shape
        groups, floats = (rows, self.format.num_groups(columns)), (rows, self.format.num_scales(columns))
        parts = {
            "scales": (self.scales, floats), "zero points": (self.zero_points, groups),
            "minimums": (self.minimums, floats), "permutation": (self.permutation, (columns,)),
            "factors": (self.factors, groups), "factors of minimums": (self.min_factors, groups),
        }  # fmt: skip
        for name, (part, shape) in parts.items():
            if part is not None and tuple(part.shape) != shape:
                raise ValueError(f"{name} of {rows} x {columns} codes in {self.format.name}: {part.shape}, not {shape}")
        given = {"zero_points": self.zero_points is not None, "minimums": self.minimums is not None}
        if extra := [name for name, is_given in given.items() if is_given and name != self.format.offsets]:
            raise ValueError(f"a matrix in {self.format.name} has {extra[0].replace('_', ' ')}")
        has_minimums = self.format.offsets == "minimums"
        wanted = bool(self.format.block), bool(self.format.block) and has_minimums
        if (self.factors is not None, self.min_factors is not None) != wanted:
            raise ValueError(
                f"a matrix in {self.format.name} has factors for each group exactly where blocks share scales"
            )

    @property
    def shape(self) -> tuple[int, ...]:
        return self.codes.shape

    def rows(self, index: Any) -> QuantizedMatrix:
        """Return some rows. index: a slice, or an array of row numbers; rows of one block count as rows alone."""
        parts: dict[str, Any] = {n: part[index] for n in BY_ROW if (part := getattr(self, n)) is not None}
        return replace(self, format=replace(self.format, rows=1), **parts)

    @property
    def arrays(self) -> tuple[Array, ...]:
        """Return all arrays that the matrix consists of."""
        parts = (getattr(self, name) for name in ARRAYS)
        return tuple(part for part in parts if part is not None)


class QuantizedStack:
    """Matrices of one shape and format, [experts, out, in]. The first index chooses one."""

    def __init__(self, matrices: Sequence[QuantizedMatrix]) -> None:
        self._matrices = tuple(matrices)

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self._matrices), *self._matrices[0].shape)

    def __getitem__(self, index: int) -> QuantizedMatrix:
        return self._matrices[index]

    @property
    def arrays(self) -> tuple[Array, ...]:
        """Return all arrays that the matrices consist of."""
        return tuple(array for matrix in self._matrices for array in matrix.arrays)
