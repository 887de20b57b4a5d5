"""Define the formats of matrices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from ridgeline.errors import RequestError
from ridgeline.spec.dtype import DTYPE_BYTES, DType


@dataclass(frozen=True, slots=True)
class Format:
    """A format of matrices.

    bits: bits of a number; 0 keeps the type of the checkpoint. group: neighboring numbers of a row that share a scale;
    0 means that the whole row has one scale.
    """

    name: str
    bits: int = 0
    group: int = 0

    @property
    def is_lossy(self) -> bool:
        """Return whether numbers are rounded."""
        return self.bits > 0

    def number_bytes(self, dtype: DType) -> float:
        """Return the bytes of a number, with its share of the scale of a group. dtype: type in the checkpoint."""
        return self.bits / 8 + (2 / self.group if self.group else 0) if self.is_lossy else DTYPE_BYTES[dtype]


PLAIN: Final = Format("plain")
INT8: Final = Format("int8", 8)
# Name -> format.
FORMATS: Final[Mapping[str, Format]] = {
    "auto": PLAIN,
    "int8": INT8,
    "int4": Format("int4", 4, 32),
    "int4-128": Format("int4-128", 4, 128),
}


def format_of(name: str) -> Format:
    """Return a format by its name. Raises RequestError for an unknown name."""
    if name not in FORMATS:
        raise RequestError(f"weights (--weights) {name!r} is not known; known are {', '.join(FORMATS)}")
    return FORMATS[name]


PANEL = 32  # rows that kernels pack together (csrc/matrix.h)


def packed_bytes(format: Format, dtype: DType, rows: int, columns: int, *, paired: bool = False) -> int:
    """Return the bytes of a matrix as the kernels of the cpu backend pack it, in whole panels.

    dtype: type in the checkpoint. paired: the matrix is interleaved with another one, 16 rows of each in a panel; the
    result then counts both.
    """
    panels = -(-rows // (PANEL // 2)) if paired else -(-rows // PANEL)
    if format.bits == 8:
        return panels * PANEL * (-(-columns // 8) * 8 + 4)
    if format.bits == 4:
        return panels * PANEL * -(-columns // format.group) * (format.group // 2 + 2)
    padded = -(-columns // 2) * 2 if dtype == "bfloat16" else columns
    return panels * PANEL * padded * DTYPE_BYTES[dtype]


def coded_bytes(format: Format, rows: int, columns: int) -> int:
    """Return the bytes of a rounded matrix without kernels: a byte for each number, and scales in float32."""
    return rows * columns + 4 * rows * (-(-columns // format.group) if format.group else 1)
