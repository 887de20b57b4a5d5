"""Unpack the blocks of a GGUF tensor into codes with scales, or into float32.

Each quantized type is a code per weight, with a scale and, in some types, a minimum per group:

    value = scale * code - minimum

K-quants store scales and minima as small whole numbers, and one float16 for each block that multiplies them. All
products and differences are rounded to float32 in the order in which ggml computes them, so that `dequantize` returns
the same bits as the `dequantize` of the `gguf` package. The layouts are those of ggml's blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from ridgeline.load.gguf.blocks import BlockType

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Ints = np.ndarray[Any, np.dtype[np.int8]]
Floats = np.ndarray[Any, np.dtype[np.float32]]

_CHUNK = 1 << 21  # weights that are unpacked at once, which bounds the memory of intermediate results
# The values of IQ4_NL and IQ4_XS, and twice those of MXFP4.
NONLINEAR = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8)
MXFP4 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)
_MXFP4_MOST = 252  # largest exponent byte whose products are all finite; 255 means NaN


@dataclass(frozen=True, slots=True)
class Codes:
    """A quantized matrix without any rounding: value = scale * code - minimum, for each group of a row.

    codes: int8 [..., columns]. group: neighboring columns that share a scale. d: float32 [..., blocks], factor of the
    scales of a block. factors: int8 or uint8 [..., groups]; None where each block is one group, whose scale is d. dmin,
    min_factors: likewise for minima; None for types without minima.
    """

    codes: Ints
    group: int
    d: Floats
    factors: np.ndarray[Any, Any] | None = None
    dmin: Floats | None = None
    min_factors: np.ndarray[Any, Any] | None = None

    @property
    def scales(self) -> Floats:
        """Return the scale of each group, float32 [..., groups]: d * factor, rounded once."""
        return _product(self.d, self.factors)

    @property
    def minima(self) -> Floats | None:
        """Return the minimum of each group, float32 [..., groups], which is subtracted; None if the type has none."""
        return None if self.dmin is None else _product(self.dmin, self.min_factors)

    def values(self) -> Floats:
        """Return the matrix as float32: a product and a difference for each weight, each rounded once."""
        grouped = self.codes.reshape(*self.codes.shape[:-1], -1, self.group)
        out: Floats = grouped.astype(np.float32)
        out *= self.scales[..., None]
        if (minima := self.minima) is not None:
            out -= minima[..., None]
        return out.reshape(self.codes.shape)


def unpack(kind: BlockType, rows: Bytes) -> Codes:
    """Return the codes of rows of blocks, uint8 [..., row bytes], of a quantized type.

    Raises ValueError if a scale or a minimum is infinite or NaN.
    """
    lead = rows.shape[:-1]
    blocks = rows.reshape(-1, kind.size)
    parts = _UNPACK[kind.name](blocks)
    for name, factor in (("scale", parts.d), ("minimum", parts.dmin)):
        if factor is not None and not np.isfinite(factor).all():
            raise ValueError(f"has a {name} that is infinite or NaN")

    def shaped(x: np.ndarray[Any, Any] | None) -> Any:
        return None if x is None else x.reshape(*lead, -1)

    return Codes(
        shaped(parts.codes), kind.group, shaped(parts.d), shaped(parts.factors), shaped(parts.dmin),
        shaped(parts.min_factors),
    )  # fmt: skip


def dequantize(kind: BlockType, rows: Bytes) -> Floats:
    """Return the values of rows of blocks, uint8 [..., row bytes], as float32. Raises ValueError as `unpack` does."""
    columns = rows.shape[-1] // kind.size * kind.weights
    if kind.is_float:
        return _floats(kind, rows)
    out = np.empty((*rows.shape[:-1], columns), np.float32)
    flat, target = rows.reshape(-1, rows.shape[-1]), out.reshape(-1, columns)
    step = max(1, _CHUNK // columns)
    for start in range(0, len(flat), step):
        target[start : start + step] = unpack(kind, flat[start : start + step]).values()
    return out


def _floats(kind: BlockType, rows: Bytes) -> Floats:
    rows = np.ascontiguousarray(rows)
    if kind.name == "BF16":
        return (rows.view("<u2").astype(np.uint32) << 16).view(np.float32)
    return rows.view("<f2" if kind.name == "F16" else "<f4").astype(np.float32)


def _product(d: Floats, factors: np.ndarray[Any, Any] | None) -> Floats:
    if factors is None:
        return d
    grouped = factors.reshape(*d.shape, -1).astype(np.float32)
    grouped *= d[..., None]
    return grouped.reshape(factors.shape)


class Parts(NamedTuple):
    """Codes [n, weights], factors [n, groups] and multipliers [n] of n blocks."""

    codes: Ints
    d: Floats
    factors: np.ndarray[Any, Any] | None = None
    dmin: Floats | None = None
    min_factors: np.ndarray[Any, Any] | None = None


def spread(data: Bytes, width: int, bits: int) -> Bytes:
    """Return the fields of `bits` bits in bytes [n, size]: for each run of `width` bytes first all lowest fields, then
    all next ones.
    """
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    fields = data.reshape(len(data), -1, 1, width) >> shifts & np.uint8((1 << bits) - 1)
    return fields.reshape(len(data), -1)


def gather(fields: np.ndarray[Any, Any], width: int, bits: int) -> Bytes:
    """Return the bytes that `spread` turns into these fields."""
    parts = fields.reshape(len(fields), -1, 8 // bits, width)
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    joined: Bytes = np.bitwise_or.reduce(parts.astype(np.uint8) << shifts, axis=2).reshape(len(fields), -1)
    return joined


def _half(data: Bytes) -> Floats:
    return np.ascontiguousarray(data).view("<f2").astype(np.float32)[:, 0]


def _shifted(fields: np.ndarray[Any, Any], offset: int) -> Ints:
    return fields.astype(np.int8) - np.int8(offset)


def _q4_0(b: Bytes) -> Parts:
    return Parts(_shifted(spread(b[:, 2:], 16, 4), 8), _half(b[:, :2]))


def _q4_1(b: Bytes) -> Parts:
    return Parts(_shifted(spread(b[:, 4:], 16, 4), 0), _half(b[:, :2]), dmin=-_half(b[:, 2:4]))


def _five(high: Bytes, low: Bytes) -> Bytes:
    """Return fields of five bits: 32 highest bits in four bytes, the others in halves of bytes."""
    fields: Bytes = spread(low, 16, 4)
    fields |= np.unpackbits(high, axis=1, bitorder="little") << np.uint8(4)
    return fields


def _q5_0(b: Bytes) -> Parts:
    return Parts(_shifted(_five(b[:, 2:6], b[:, 6:]), 16), _half(b[:, :2]))


def _q5_1(b: Bytes) -> Parts:
    return Parts(_shifted(_five(b[:, 4:8], b[:, 8:]), 0), _half(b[:, :2]), dmin=-_half(b[:, 2:4]))


def _q8_0(b: Bytes) -> Parts:
    return Parts(b[:, 2:].view(np.int8), _half(b[:, :2]))


def _q2_k(b: Bytes) -> Parts:
    factors, codes = b[:, :16], spread(b[:, 16:80], 32, 2)
    return Parts(_shifted(codes, 0), _half(b[:, 80:82]), factors & 15, _half(b[:, 82:84]), factors >> 4)


def _q3_k(b: Bytes) -> Parts:
    above = spread(b[:, :32], 32, 1)  # 1: the code is not lowered by 4
    codes = _shifted(spread(b[:, 32:96], 32, 2) | above << 2, 4)
    factors = spread(b[:, 96:104], 8, 4) | spread(b[:, 104:108], 4, 2) << 4
    return Parts(codes, _half(b[:, 108:110]), _shifted(factors, 32))


def six_bits(packed: Bytes) -> tuple[Bytes, Bytes]:
    """Return eight factors of scales and of minima, six bits each, from the 12 bytes of Q4_K and Q5_K."""
    low, middle, high = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate([low & 63, high & 15 | low >> 6 << 4], axis=1)
    minima = np.concatenate([middle & 63, high >> 4 | middle >> 6 << 4], axis=1)
    return scales, minima


def _q4_k(b: Bytes) -> Parts:
    factors, min_factors = six_bits(b[:, 4:16])
    codes = _shifted(spread(b[:, 16:], 32, 4), 0)
    return Parts(codes, _half(b[:, :2]), factors, _half(b[:, 2:4]), min_factors)


def _q5_k(b: Bytes) -> Parts:
    factors, min_factors = six_bits(b[:, 4:16])
    codes = spread(b[:, 48:], 32, 4) | spread(b[:, 16:48], 32, 1) << 4
    return Parts(_shifted(codes, 0), _half(b[:, :2]), factors, _half(b[:, 2:4]), min_factors)


def _q6_k(b: Bytes) -> Parts:
    codes = spread(b[:, :128], 64, 4) | spread(b[:, 128:192], 32, 2) << 4
    return Parts(_shifted(codes, 32), _half(b[:, 208:210]), b[:, 192:208].view(np.int8))


def _iq4_nl(b: Bytes) -> Parts:
    return Parts(NONLINEAR[spread(b[:, 2:], 16, 4)], _half(b[:, :2]))


def _iq4_xs(b: Bytes) -> Parts:
    high = spread(b[:, 2:4], 1, 2)  # two bits of each of eight factors
    factors = spread(b[:, 4:8], 1, 4) | high << 4
    return Parts(NONLINEAR[spread(b[:, 8:], 16, 4)], _half(b[:, :2]), _shifted(factors, 32))


def _mxfp4(b: Bytes) -> Parts:
    # Half of 2 ** (exponent - 127), since the codes are doubled; the two least exponents give denormal numbers.
    exponent = b[:, 0].astype(np.int32)
    scale = np.ldexp(np.float32(1), exponent - 128)
    scale[exponent > _MXFP4_MOST] = np.inf
    return Parts(MXFP4[spread(b[:, 1:], 16, 4)], scale)


_UNPACK: Mapping[str, Callable[[Bytes], Parts]] = MappingProxyType({
    "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1, "Q8_0": _q8_0, "Q2_K": _q2_k, "Q3_K": _q3_k,
    "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k, "IQ4_NL": _iq4_nl, "IQ4_XS": _iq4_xs, "MXFP4": _mxfp4,
})  # fmt: skip
