"""The formats in which a matrix can be stored, with the bytes that each takes."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Final, Literal, get_args

from ridgeline.errors import RequestError
from ridgeline.spec.dtype import DTYPE_BYTES, DType
from ridgeline.spec.weight import Weight

NumberType = Literal["plain", "int8", "int6", "int5", "int4", "int3", "int2", "fp8", "fp4", "nf4", "iq4"]
Offsets = Literal["none", "zero_points", "minimums"]
Activations = Literal["exact", "bf16", "int8", "outliers", "fp8"]


ACTIVATIONS: Final[tuple[Activations, ...]] = get_args(Activations)
Method = Literal["rtn", "clip", "awq", "gptq", "smooth", "keep", "qat", "type"]  # ways to choose codes
METHODS: Final[tuple[Method, ...]] = (
    "rtn",
    "clip",
    "awq",
    "gptq",
    "smooth",
    "keep",
    "qat",
)  # they begin the names of schemes


@dataclass(frozen=True, slots=True)
class Numbers:
    """The numbers that codes stand for: whole numbers from `low` to `high`, or `levels[code]`.

    steps: a group's largest magnitude divided by its scale, where numbers are rounded without zero points.
    """

    bits: int
    low: int = 0
    high: int = 0
    steps: float = 0.0
    levels: tuple[float, ...] = ()


def _e4m3() -> tuple[float, ...]:
    """Return the number for each byte: sign, 4 bits of exponent, 3 of mantissa, no infinity (arXiv:2209.05433)."""
    half = [(m if e == 0 else 8 + m) * 2.0 ** (max(e, 1) - 10) for e in range(16) for m in range(8)]
    half[-1] = float("nan")
    return (*half, *(-x for x in half))


_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# Quantiles of a normal distribution, each tail with its own number of levels (arXiv:2305.14314, appendix E).
_NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
# Levels of llama.cpp's IQ4_NL and IQ4_XS.
_IQ4 = (-127.0, -104.0, -83.0, -65.0, -49.0, -35.0, -22.0, -10.0, 1.0, 13.0, 25.0, 38.0, 53.0, 69.0, 89.0, 113.0)
NUMBERS: Final[Mapping[NumberType, Numbers]] = {
    "int8": Numbers(8, -128, 127, 127),
    "int6": Numbers(6, -32, 31, 31.5),
    "int5": Numbers(5, -16, 15, 15.5),
    "int4": Numbers(4, -8, 7, 7.5),
    "int3": Numbers(3, -4, 3, 3.5),
    "int2": Numbers(2, -2, 1, 1.5),
    "fp8": Numbers(8, steps=448, levels=_e4m3()),
    "fp4": Numbers(4, steps=6, levels=(*_FP4, *(-x for x in _FP4))),
    "nf4": Numbers(4, steps=1, levels=_NF4),
    "iq4": Numbers(4, steps=127, levels=_IQ4),
}
# For each type: columns that share a scale, and how activations are taken, where the name of a format says neither.
_DEFAULTS: Final[Mapping[NumberType, tuple[int, Activations]]] = {
    "plain": (0, "exact"), "int8": (0, "int8"), "int4": (32, "int8"), "int3": (32, "int8"), "int2": (32, "int8"),
    "int6": (32, "int8"), "int5": (32, "int8"), "fp8": (0, "exact"), "fp4": (32, "exact"), "nf4": (64, "exact"),
    "iq4": (32, "exact"),
}  # fmt: skip
_OFFSETS: Final[Mapping[str, Offsets]] = {"": "none", "-asym": "zero_points", "-min": "minimums"}
_NAME = re.compile(
    r"(?P<numbers>[a-z0-9]+?)"
    r"(?:-(?P<tensor>tensor)|-(?P<row>row)|-(?P<rows>\d+)x(?P<width>\d+)|-(?P<group>\d+)(?:of(?P<block>\d+))?)?"
    r"(?P<offsets>-asym|-min)?(?:-(?P<activations>exact|bf16|int8|outliers|fp8))?"
)


@dataclass(frozen=True, slots=True)
class Format:
    """A way to store a matrix, and to multiply with it.

    Attributes:
        numbers: the numbers that codes stand for; "plain" for a matrix that keeps the type of the checkpoint.
        group: neighboring columns that share one scale; 0 where a whole row does.
        rows: rows that share their scales; 1 for scales by row or group, more for blocks, 0 where all rows do.
        block: columns of a block: the scales of its groups are one number times a whole number for each group, and so
            are their minimums (the K-quants of GGUF files); 0 where groups are alone.
        offsets: "none" where code 0 is the number 0; "zero_points" where each group has a whole number that stands for
            0; "minimums" where each group has a float that is subtracted from code x scale. Codes are then unsigned.
        activations: how the input of a product is taken. "exact": in float32. "bf16": each number rounded to bfloat16,
            ties to even. "int8" or "fp8": rounded for each token alone, its largest magnitude to the largest number of
            the type. "outliers": magnitudes of 6 or more are exact and the others as in int8 (LLM.int8(),
            arXiv:2208.07339). Plain matrices take "exact" or "bf16".
    """

    numbers: NumberType = "plain"
    group: int = 0
    rows: int = 1
    offsets: Offsets = "none"
    activations: Activations = "exact"
    block: int = 0

    @property
    def name(self) -> str:
        """Return the name that users write. `format_of` returns the format of a name."""
        if not self.is_lossy:
            return "plain" if self.activations == "exact" else f"plain-{self.activations}"
        group, activations = _DEFAULTS[self.numbers]
        of = f"of{self.block}" if self.block else ""
        is_default = (self.rows, self.group, self.block) == (1, group, 0)
        shared = "" if is_default else f"-{self.group}{of}" if self.group else "-row"
        if self.rows != 1:
            shared = f"-{self.rows}x{self.group}" if self.rows else "-tensor"
        offsets = next(text for text, kind in _OFFSETS.items() if kind == self.offsets)
        return self.numbers + shared + offsets + ("" if self.activations == activations else f"-{self.activations}")

    @property
    def is_lossy(self) -> bool:
        """Return whether numbers are rounded."""
        return self.numbers != "plain"

    @property
    def bits(self) -> int:
        """Return the bits of one code; 0 where numbers are not rounded."""
        return NUMBERS[self.numbers].bits if self.is_lossy else 0

    @property
    def scale_bits(self) -> int:
        """Return the bits of one scale in the kernels' layout: float16 for groups and blocks, float32 otherwise."""
        return 16 if self.group and self.rows == 1 else 32

    @property
    def group_bits(self) -> float:
        """Return the bits of a group's scale and offset, with its share of those of a block."""
        if not self.block:
            return self.scale_bits + self.offset_bits
        count = 2 if self.offsets == "minimums" else 1
        return count * (FACTOR_BITS + 16 * self.group / self.block)

    @property
    def offset_bits(self) -> int:
        """Return the bits of one zero point or minimum."""
        return {"none": 0, "zero_points": self.bits, "minimums": 16}[self.offsets]

    def number_bytes(self, dtype: DType) -> float:
        """Return the bytes of one number, with its share of a group's scale. `dtype` is the type in the checkpoint."""
        if not self.is_lossy:
            return DTYPE_BYTES[dtype]
        shared = self.group_bits if self.group and self.rows == 1 else 0
        return (self.bits + (shared / self.group if shared else 0)) / 8

    def num_groups(self, columns: int) -> int:
        """Return the number of groups of one row: of its scales, unless blocks share them."""
        return -(-columns // self.group) if self.group else 1

    def num_scales(self, columns: int) -> int:
        """Return the number of scales of one row that are floats: one for each block, or else for each group."""
        return -(-columns // self.block) if self.block else self.num_groups(columns)


FACTOR_BITS: Final = 8  # bits of the whole number with which a group multiplies the scale of its block
PLAIN: Final = Format()
# Names that users write most, each with its format. `format_of` reads all others of the same pattern.
FORMATS: Final[Mapping[str, Format]] = {
    "auto": PLAIN,
    "int8": Format("int8", activations="int8"),
    "int4": Format("int4", 32, activations="int8"),
    "int4-128": Format("int4", 128, activations="int8"),
    "int4-asym": Format("int4", 32, offsets="zero_points", activations="int8"),
    "int3": Format("int3", 32, activations="int8"),
    "int2": Format("int2", 32, activations="int8"),
    "fp8": Format("fp8"),
}
INT8: Final = FORMATS["int8"]
LARGEST_GROUP: Final = 2**20  # columns


def format_of(name: str, activations: str | None = None) -> Format:
    """Return the format that users call `name`, such as `int4`, `int4-128`, `int4-128-asym` or `int8-exact`.

    activations: how activations are taken, where it is not the default of the format. Raises RequestError for an
    unknown name.
    """
    found = FORMATS.get(name) or _parse(name)
    if found is None and (name.startswith(tuple(f"{method}-" for method in METHODS)) or name == "llm.int8"):
        raise RequestError(
            f"weights (--weights) {name!r} chooses codes with data: write a folder with `ridgeline quantize MODEL "
            f"--scheme {name} --out DIR`, and open it without --weights"
        )
    if found is None:
        raise RequestError(
            f"weights (--weights) {name!r} is not known; known are {', '.join(FORMATS)}, each with -GROUP, -asym or "
            "-exact behind it, such as int4-128-asym"
        )
    if activations is None:
        return found
    kind = activations_of(activations)
    if not found.is_lossy:  # the other ways are for codes that the checkpoint may have
        return replace(found, activations="bf16") if kind == "bf16" else found
    return _checked(replace(found, activations=kind), name)


def activations_of(name: str) -> Activations:
    """Return the way to take activations that users call `name`. Raises RequestError for an unknown name."""
    chosen = next((known for known in ACTIVATIONS if known == name), None)
    if chosen is None:
        raise RequestError(f"activations (--activations) {name!r} is not known; known are {', '.join(ACTIVATIONS)}")
    return chosen


def _parse(name: str) -> Format | None:
    match = _NAME.fullmatch(name)
    if match is None or match["numbers"] not in NUMBERS:
        return None
    numbers: NumberType = next(known for known in NUMBERS if known == match["numbers"])
    group, activations = _DEFAULTS[numbers]
    rows = 1
    if match["tensor"] or match["row"]:
        group, rows = 0, 0 if match["tensor"] else 1
    elif match["width"]:
        rows, group = int(match["rows"]), int(match["width"])
    elif match["group"]:
        group = int(match["group"])
    block = int(match["block"] or 0)
    if (match["group"] or match["width"]) and not (0 < group <= LARGEST_GROUP and 0 < rows <= LARGEST_GROUP):
        return None
    if match["block"] and not (group <= block <= LARGEST_GROUP and block % group == 0):
        return None
    chosen = next((a for a in ACTIVATIONS if a == match["activations"]), activations)
    return _checked(Format(numbers, group, rows, _OFFSETS[match["offsets"] or ""], chosen, block), name)


def _checked(format: Format, name: str) -> Format:
    """Return the format. Raises RequestError for parts that do not go together."""
    if NUMBERS[format.numbers].levels and format.offsets == "zero_points":
        raise RequestError(f"weights (--weights) {name!r}: {format.numbers} has no zero points; leave out -asym")
    if format.block and format.offsets == "zero_points":
        raise RequestError(f"weights (--weights) {name!r}: blocks have no zero points; leave out -asym")
    if NUMBERS[format.numbers].levels and format.activations in ("int8", "outliers"):
        raise RequestError(
            f"weights (--weights) {name!r}: activations in int8 need weights in whole numbers; take exact activations"
        )
    return format


@dataclass(frozen=True, slots=True)
class FormatTable:
    """The format of each matrix of a model: that of its name in `by_name`, or else `default` where it may be rounded.

    Names are those of `ModelSpec.weights()`; an embedding that is also the head has the name `head.weight` there.
    """

    default: Format = PLAIN
    by_name: Mapping[str, Format] | None = None

    def of(self, weight: Weight) -> Format:
        """Return the format of a matrix."""
        found = (self.by_name or {}).get(weight.name)
        return found if found is not None else self.default if weight.may_be_rounded else PLAIN

    def stored(self, weight: Weight) -> Format | None:
        """Return the format of a matrix as the checkpoint has it; None for a vector. An embedding may be codes."""
        if not weight.is_matrix:
            return None
        return (self.by_name or {}).get(weight.name) or (PLAIN if "embed" in weight.name else self.of(weight))

    @property
    def main(self) -> Format:
        """Return the format of most matrices."""
        return Counter(self.by_name.values()).most_common(1)[0][0] if self.by_name else self.default

    def type_of_most(self, dtype: str) -> str:
        """Return the name of the format of most matrices, or `dtype`, the type of floats, if most are not rounded."""
        return self.main.name if self.main.is_lossy else dtype

    def with_others(self, more: Mapping[str, Format]) -> FormatTable:
        """Return a table that also has the formats of other matrices, by name."""
        return FormatTable(self.default, {**(self.by_name or {}), **more} or None)

    @property
    def formats(self) -> frozenset[Format]:
        """Return all formats that occur."""
        return frozenset((self.default, *(self.by_name or {}).values()))

    @property
    def is_lossy(self) -> bool:
        """Return whether some matrix is rounded."""
        return any(format.is_lossy for format in self.formats)

    def to_json(self) -> dict[str, str]:
        """Return the names of the formats: of the default under "default", and of each matrix under its name."""
        return {"default": self.default.name, **{name: f.name for name, f in (self.by_name or {}).items()}}

    @staticmethod
    def from_json(names: Mapping[str, str]) -> FormatTable:
        """Return the table that `to_json` described. Raises RequestError for an unknown format."""
        plain = {format.name: format for format in (PLAIN, format_of("auto", "bf16"))}
        found = {name: plain.get(f) or format_of(f) for name, f in names.items()}
        return FormatTable(found.pop("default", PLAIN), found or None)


OUTLIER: Final = 6.0  # activations of this magnitude or more are exact where a format says "outliers"
# Numbers that the cpu backend's kernels read, with the ways in which they take activations (csrc/matrix.h).
_LAYOUTS: Final[Mapping[NumberType, tuple[Activations, ...]]] = {
    **dict.fromkeys(("int8", "int6", "int5", "int4", "int3", "int2"), ("int8", "exact", "bf16")),
    "plain": ("exact", "bf16"), "fp8": ("exact", "bf16"),
}  # fmt: skip
# The groups, offsets and blocks of numbers whose blocks they read: those of Q4_K, Q5_K and Q6_K.
_BLOCKS: Final[Mapping[NumberType, tuple[int, Offsets, int]]] = {
    "int4": (32, "minimums", 256), "int5": (32, "minimums", 256), "int6": (16, "none", 256),
}  # fmt: skip
_PIECE, _LARGEST_PACKED_GROUP = 32, 256  # columns: a group is a multiple of the one, and at most the other
AS_STORED: Final = FormatTable()  # all matrices keep the type of the checkpoint
PANEL = 32  # rows that the kernels store side by side (csrc/matrix.h)


def code_range(format: Format) -> tuple[int, int]:
    """Return the least and the largest code of a format: from 0 where groups have minimums."""
    numbers = NUMBERS[format.numbers]
    if format.offsets == "minimums" and not numbers.levels:
        return 0, (1 << numbers.bits) - 1
    return (0, len(numbers.levels) - 1) if numbers.levels else (numbers.low, numbers.high)


def whole_numbers() -> tuple[NumberType, ...]:
    """Return the kinds of whole numbers, the narrowest first."""
    return tuple(sorted((name for name, n in NUMBERS.items() if not n.levels), key=lambda name: NUMBERS[name].bits))


def has_layout(format: Format) -> bool:
    """Return whether the kernels of the cpu backend read matrices of a format."""
    if format.activations not in _LAYOUTS.get(format.numbers, ()):
        return False
    if not format.is_lossy:
        return True
    if format.block:
        return _BLOCKS.get(format.numbers) == (format.group, format.offsets, format.block)
    if format.group % _PIECE or format.group > _LARGEST_PACKED_GROUP:
        return False
    return format.offsets == "none" or format.numbers != "fp8"


def packed_bytes(format: Format, dtype: DType, rows: int, columns: int, *, paired: bool = False) -> int:
    """Return the bytes of a matrix in the layout of the cpu backend's kernels, in whole panels.

    Args:
        dtype: type of the matrix in the checkpoint.
        paired: whether the matrix is interleaved with another of its shape, 16 rows of each to a panel. The result is
            then the bytes of both.
    """
    panels = -(-rows // (PANEL // 2)) if paired else -(-rows // PANEL)
    return panels * (PANEL * _row_bits(format, dtype, columns) // 8)


def _row_bits(format: Format, dtype: DType, columns: int) -> int:
    """Return the bits of one row in a panel."""
    if not format.is_lossy:
        padded = -(-columns // 2) * 2 if dtype == "bfloat16" else columns
        return padded * DTYPE_BYTES[dtype] * 8
    sums_rows = (format.numbers, format.group, format.offsets, format.activations) == ("int8", 0, "none", "int8")
    unit = 8 if sums_rows else format.block or format.group or _PIECE
    padded = -(-columns // unit) * unit
    if format.block:
        return padded * format.bits + padded // format.block * int(format.group_bits * format.block // format.group)
    zeros = 4 if format.bits <= 4 else 8
    shared = format.scale_bits + {"none": 0, "zero_points": zeros, "minimums": 16}[format.offsets]
    return padded * format.bits + padded // (format.group or padded) * shared


def coded_bytes(format: Format, rows: int, columns: int) -> int:
    """Return the bytes of a rounded matrix without kernels: one byte per number, and scales in float32."""
    offset = {"none": 0, "zero_points": 1, "minimums": 4}[format.offsets]
    factors = (2 if offset else 1) * format.num_groups(columns) if format.block else 0
    return rows * (columns + (4 + offset) * format.num_scales(columns) + factors)


def as_fields(format: Format) -> dict[str, str | int]:
    """Return the fields of a format by name, for reports."""
    return {"name": format.name, **{f.name: getattr(format, f.name) for f in fields(format)}}
