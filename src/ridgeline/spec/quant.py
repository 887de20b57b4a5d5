"""The formats in which a matrix can be stored, with the bytes that each takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Literal

from ridgeline.errors import RequestError
from ridgeline.spec.dtype import DTYPE_BYTES, DType

Scheme = Literal["plain", "int8", "int4"]


@dataclass(frozen=True, slots=True)
class Format:
    """A way to store a matrix.

    Attributes:
        name: the name that users write; "plain" for matrices that keep the type of the checkpoint.
        scheme: how numbers are rounded and what error a product may have. Tables in `quant/`, `ops/host/quant.py`,
            `ops/reference/quant.py` and `ops/cpu/matrices.py` are keyed by it.
        bits: bits of one code; 0 where numbers are not rounded.
        group: neighboring numbers of a row that share one scale; 0 where a whole row has one scale.
    """

    name: str
    scheme: Scheme = "plain"
    bits: int = 0
    group: int = 0

    @property
    def is_lossy(self) -> bool:
        """Return whether numbers are rounded."""
        return self.scheme != "plain"

    def number_bytes(self, dtype: DType) -> float:
        """Return the bytes of one number, with its share of a group's scale. `dtype` is the type in the checkpoint."""
        return self.bits / 8 + (2 / self.group if self.group else 0) if self.is_lossy else DTYPE_BYTES[dtype]

    def num_groups(self, columns: int) -> int:
        """Return the number of scales of one row."""
        return -(-columns // self.group) if self.group else 1


CODES: Final[Mapping[Scheme, tuple[int, int]]] = {"int8": (-127, 127), "int4": (-8, 7)}  # least and largest code
PLAIN: Final = Format("plain")
INT8: Final = Format("int8", "int8", 8)
# The names that users write, each with its format.
FORMATS: Final[Mapping[str, Format]] = {
    "auto": PLAIN,
    "int8": INT8,
    "int4": Format("int4", "int4", 4, 32),
    "int4-128": Format("int4-128", "int4", 4, 128),
}


def format_of(name: str) -> Format:
    """Return the format that users call `name`. Raises RequestError for an unknown name."""
    if name not in FORMATS:
        raise RequestError(f"weights (--weights) {name!r} is not known; known are {', '.join(FORMATS)}")
    return FORMATS[name]


PANEL = 32  # rows that the kernels store side by side (csrc/matrix.h)


def packed_bytes(format: Format, dtype: DType, rows: int, columns: int, *, paired: bool = False) -> int:
    """Return the bytes of a matrix in the layout of the cpu backend's kernels, in whole panels.

    Args:
        dtype: type of the matrix in the checkpoint.
        paired: whether the matrix is interleaved with another of its shape, 16 rows of each to a panel. The result is
            then the bytes of both.
    """
    panels = -(-rows // (PANEL // 2)) if paired else -(-rows // PANEL)
    return panels * PANEL * _ROW_BYTES[format.scheme](format, dtype, columns)


def _plain_row(format: Format, dtype: DType, columns: int) -> int:
    padded = -(-columns // 2) * 2 if dtype == "bfloat16" else columns
    return padded * DTYPE_BYTES[dtype]


def _int8_row(format: Format, dtype: DType, columns: int) -> int:
    return -(-columns // 8) * 8 + 4  # a float32 scale


def _int4_row(format: Format, dtype: DType, columns: int) -> int:
    return format.num_groups(columns) * (format.group // 2 + 2)  # a float16 scale after each group


_ROW_BYTES: Final[Mapping[Scheme, Callable[[Format, DType, int], int]]] = {
    "plain": _plain_row,
    "int8": _int8_row,
    "int4": _int4_row,
}  # bytes of one row in a panel


def coded_bytes(format: Format, rows: int, columns: int) -> int:
    """Return the bytes of a rounded matrix without kernels: one byte per number, and scales in float32."""
    return rows * columns + 4 * rows * format.num_groups(columns)
