"""Arrays of a backend's library, and matrices as codes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from ridgeline.spec.quant import Format


class Array(Protocol):
    """An array of the backend's library. Only ops access its elements."""

    @property
    def shape(self) -> tuple[int, ...]: ...


@dataclass(frozen=True, eq=False)
class QuantizedMatrix:
    """A matrix [out, in] as codes. Number (i, j) is (codes[i, j] - zero point) x scale, with the zero point and the
    scale of its group; absent zero points are 0. `format` says how many neighbors make a group.
    """

    format: Format
    codes: Array  # [out, in], int8
    scales: Array  # [out, groups], float32
    zero_points: Array | None = None  # [out, groups], int8
    permutation: Array | None = None  # [in], integers: column j multiplies element permutation[j] of the input

    def __post_init__(self) -> None:
        rows, columns = self.codes.shape
        groups = (rows, self.format.num_groups(columns))
        parts = (self.scales, groups), (self.zero_points, groups), (self.permutation, (columns,))
        for name, (part, shape) in zip(("scales", "zero points", "permutation"), parts, strict=True):
            if part is not None and tuple(part.shape) != shape:
                raise ValueError(f"{name} of {rows} x {columns} codes in {self.format.name}: {part.shape}, not {shape}")

    @property
    def shape(self) -> tuple[int, ...]:
        return self.codes.shape

    @property
    def arrays(self) -> tuple[Array, ...]:
        """All arrays that the matrix consists of."""
        parts = (self.codes, self.scales, self.zero_points, self.permutation)
        return tuple(part for part in parts if part is not None)
