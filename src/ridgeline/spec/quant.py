"""The formats that a matrix can be kept in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from ridgeline.errors import RequestError
from ridgeline.spec.dtype import DTYPE_BYTES, DType


@dataclass(frozen=True, slots=True)
class Format:
    """bits: of a number; 0: the type that the matrix comes in. group: of a row's neighboring numbers with one scale;
    0: the whole row has one.
    """

    name: str
    bits: int = 0
    group: int = 0

    @property
    def is_lossy(self) -> bool:
        """Are numbers rounded?"""
        return self.bits > 0

    def number_bytes(self, dtype: DType) -> float:
        """Bytes of a number of a matrix, with its share of the scale of a group; `dtype`: that it came in."""
        return self.bits / 8 + (2 / self.group if self.group else 0) if self.is_lossy else DTYPE_BYTES[dtype]


PLAIN: Final = Format("plain")
INT8: Final = Format("int8", 8)
# What users write -> the format.
FORMATS: Final[Mapping[str, Format]] = {
    "auto": PLAIN,
    "int8": INT8,
    "int4": Format("int4", 4, 32),
    "int4-128": Format("int4-128", 4, 128),
}


def format_of(name: str) -> Format:
    """A format by the name that users write. Raises RequestError for one that is not known."""
    if name not in FORMATS:
        raise RequestError(f"weights (--weights) {name!r} is not known; known are {', '.join(FORMATS)}")
    return FORMATS[name]


PANEL = 32  # rows that kernels lay side by side (csrc/matrix.h)


def packed_bytes(format: Format, dtype: DType, rows: int, columns: int, *, paired: bool = False) -> int:
    """What the kernels of the cpu backend take for a matrix whose numbers came as `dtype`, in whole panels.

    paired: it is one of two that are laid into one another, 16 rows of each to a panel; for both.
    """
    panels = -(-rows // (PANEL // 2)) if paired else -(-rows // PANEL)
    if format.bits == 8:
        return panels * PANEL * (-(-columns // 8) * 8 + 4)
    if format.bits == 4:
        return panels * PANEL * -(-columns // format.group) * (format.group // 2 + 2)
    padded = -(-columns // 2) * 2 if dtype == "bfloat16" else columns
    return panels * PANEL * padded * DTYPE_BYTES[dtype]


def coded_bytes(format: Format, rows: int, columns: int) -> int:
    """What a rounded matrix takes without kernels: a byte for each number, and scales in float32."""
    return rows * columns + 4 * rows * (-(-columns // format.group) if format.group else 1)
