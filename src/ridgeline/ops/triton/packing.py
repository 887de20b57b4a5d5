"""Matrices as tiles that a program reads with 16-byte loads, whatever the sizes of the matrix are.

A tile is 64 rows of neighboring columns, and one piece of memory. Codes of up to 4 bits lie two to a byte: the low half
of a tile's bytes has the first half of its columns. Rows and columns that fill up a tile are zeros.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from ridgeline.ops.api import QuantizedMatrix
from ridgeline.spec.quant import NUMBERS, PLAIN, Format

ROWS = 64  # of a tile
FILLED = 128  # rows are filled up to a multiple: the most that one program reads
Kind = Literal["bfloat16", "float16", "float32", "fp8", "bytes", "nibbles"]
FLOATS: Mapping[torch.dtype, Kind] = {
    torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32",
}  # fmt: skip
LEAST_GROUP, LARGEST_GROUP = 32, 1024
WIDE_COLUMNS = 32  # of a tile of float16 or float32, whose numbers become two
MOST_COLUMNS = 2**17 - 2**10  # a sum of so many products of bytes fits into 32 bits


@dataclass(frozen=True, slots=True)
class Tiling:
    """The layout of a format. columns: length of one dot product; halves: number of dot products with one tile."""

    kind: Kind
    columns: int
    halves: int
    group: int

    @property
    def width(self) -> int:
        """Columns of a tile."""
        return self.columns * self.halves

    @property
    def unit(self) -> int:
        """Tiles that hold whole groups."""
        return max(1, self.group // self.width)


@dataclass(frozen=True, slots=True)
class Packed:
    """A matrix [rows, columns] on a GPU.

    codes: [row tiles, tiles, 64, bytes or numbers of a row]; scales and zero points: [row tiles, groups, 64].
    """

    format: Format
    tiling: Tiling
    rows: int
    columns: int
    codes: Tensor
    scales: Tensor | None = None
    zero_points: Tensor | None = None
    input_scale: float | None = None

    @property
    def row_tiles(self) -> int:
        return self.codes.shape[0]

    @property
    def tiles(self) -> int:
        return self.codes.shape[1]

    @property
    def groups(self) -> int:
        """Number of scales of a row, those that fill up the last tile included."""
        return 1 if self.scales is None else self.scales.shape[1]


def refuses_format(case: Format) -> str | None:
    """Return why no kernel multiplies with matrices of a format; None if one does."""
    if not case.is_lossy:
        return None
    if case.activations not in ("exact", "bf16", "int8"):
        return f"no kernel takes activations as {case.activations}"
    if NUMBERS[case.numbers].levels and case.numbers != "fp8":
        return f"no kernel reads {case.numbers}"
    if case.block or case.offsets == "minimums":
        return "no kernel reads blocks or minimums of groups"
    group = case.group
    if group and (group & (group - 1) or not LEAST_GROUP <= group <= LARGEST_GROUP):
        return f"groups have {group} columns; kernels read powers of two from {LEAST_GROUP} to {LARGEST_GROUP}"
    return None


def tiling_of(case: Format) -> Tiling:
    """Return the layout of a format of codes that `refuses_format` does not refuse."""
    kind: Kind = "fp8" if case.numbers == "fp8" else "nibbles" if case.bits <= 4 else "bytes"
    return Tiling(kind, min(case.group or 64, 64), 2 if kind == "nibbles" else 1, case.group)


def pack_plain(matrix: Tensor, format: Format = PLAIN) -> Packed:
    """Pack a matrix of floats, whose type is one of FLOATS."""
    kind = FLOATS[matrix.dtype]
    tiling = Tiling(kind, 64 if kind == "bfloat16" else WIDE_COLUMNS, 1, 0)
    return Packed(format, tiling, *matrix.shape, _tiles(matrix, tiling.columns, 1))


def pack_codes(matrix: QuantizedMatrix) -> Packed:
    """Pack a matrix of codes, whose parts are tensors."""
    case, tiling, codes = matrix.format, tiling_of(matrix.format), matrix.codes
    rows, columns = codes.shape
    if tiling.kind == "nibbles":
        tiles = _tiles(codes.to(torch.int16) - NUMBERS[case.numbers].low, tiling.width, tiling.unit)
        first, second = tiles.unflatten(-1, (2, -1)).unbind(-2)
        packed = (first | second << 4).to(torch.uint8)
    else:
        packed = _tiles(codes, tiling.width, tiling.unit)
    groups = packed.shape[1] * tiling.width // case.group if case.group else 1
    scales = _by_tile(matrix.scales, groups)
    if case.scale_bits == 16 and _are_halves(scales):
        scales = scales.half()
    zeros = None if matrix.zero_points is None else _by_tile(matrix.zero_points, groups)
    return Packed(case, tiling, rows, columns, packed, scales, zeros, matrix.input_scale)


def unpack(packed: Packed) -> Tensor | QuantizedMatrix:
    """Return the matrix that was packed."""
    tiles = packed.codes
    if packed.tiling.kind == "nibbles":
        low = NUMBERS[packed.format.numbers].low
        tiles = torch.cat((tiles & 15, tiles >> 4), -1).to(torch.int8) + low
    codes = tiles.transpose(1, 2).flatten(0, 1).flatten(1)[: packed.rows, : packed.columns]
    if packed.scales is None:
        return codes
    groups = packed.format.num_groups(packed.columns)

    def by_row(part: Tensor) -> Tensor:
        return part.transpose(1, 2).flatten(0, 1)[: packed.rows, :groups]

    zeros = None if packed.zero_points is None else by_row(packed.zero_points)
    return QuantizedMatrix(
        packed.format, codes, by_row(packed.scales).float(), zeros, input_scale=packed.input_scale
    )  # fmt: skip


def _tiles(matrix: Tensor, width: int, unit: int) -> Tensor:
    """Return [row tiles, tiles, 64, width]; the number of tiles is a multiple of `unit`."""
    rows, columns = matrix.shape
    filled = F.pad(matrix, (0, -columns % (width * unit), 0, -rows % FILLED))
    return filled.unflatten(1, (-1, width)).unflatten(0, (-1, ROWS)).transpose(1, 2).contiguous()


def _by_tile(part: Tensor, groups: int) -> Tensor:
    """Return numbers of groups [rows, groups] as [row tiles, groups, 64]."""
    filled = F.pad(part, (0, groups - part.shape[1], 0, -part.shape[0] % FILLED))
    return filled.unflatten(0, (-1, ROWS)).transpose(1, 2).contiguous()


def _are_halves(scales: Tensor) -> bool:
    """Return whether all scales are float16 numbers. Without values, as on torch's meta device, they count as such."""
    return scales.is_meta or bool((scales.half().float() == scales).all())
