"""Pack codes, scales and minima into the blocks of GGUF types that are written: the inverse of `codes.unpack`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from ridgeline.load.gguf.blocks import TYPES, BlockType
from ridgeline.load.gguf.codes import Bytes, Codes, Parts, gather
from ridgeline.load.gguf.stored import format_of_block
from ridgeline.ops.api import QuantizedMatrix
from ridgeline.spec.quant import Format


def pack(kind: BlockType, parts: Parts) -> Bytes:
    """Return blocks [n, size] of a quantized type. Raises ValueError for a scale that float16 cannot hold."""
    return _PACK[kind.name](parts)


def pack_matrix(matrix: QuantizedMatrix) -> Bytes:
    """Return a matrix [out, in] as rows of blocks, uint8 [out, row bytes].

    Its numbers stay the same. Raises ValueError for a format that no type is, and for other scales than float16.
    """
    kind = type_of(matrix.format)
    if kind is None:
        raise ValueError(f"no type of GGUF that is written holds {matrix.format.name}")
    arrays: Any = matrix
    found = Codes(
        np.asarray(arrays.codes).view(np.int8), kind.group, arrays.scales, arrays.factors, arrays.minimums,
        arrays.min_factors,
    )  # fmt: skip
    blocks = pack(kind, _by_block(kind, found))
    return blocks.reshape(len(found.codes), -1)


def type_of(format: Format) -> BlockType | None:
    """Return the type whose matrices have a format, of those that are written; None if there is none."""
    return next((TYPES[name] for name in _PACK if format_of_block(TYPES[name]) == format), None)


def half(x: np.ndarray[Any, Any]) -> Bytes:
    """Return numbers as the bytes of float16. Raises ValueError if one is too large."""
    with np.errstate(over="ignore"):
        rounded = x.astype("<f2")
    if not np.isfinite(rounded).all():
        raise ValueError(f"has a number or a scale of {float(np.abs(x).max()):g}, but float16 only reaches 65504")
    return rounded.view(np.uint8)


def _by_block(kind: BlockType, found: Codes) -> Parts:
    if any(x is not None and not np.array_equal(x, x.astype(np.float16)) for x in (found.d, found.dmin)):
        raise ValueError("has scales that are no float16 numbers")

    def blocks(x: Any) -> Any:
        return None if x is None else x.reshape(-1, x.shape[-1] * kind.weights // found.codes.shape[-1])

    def numbers(x: Any) -> Any:
        return None if x is None else x.reshape(-1)

    return Parts(
        blocks(found.codes), numbers(found.d), blocks(found.factors), numbers(found.dmin), blocks(found.min_factors)
    )


def _fields(codes: np.ndarray[Any, Any], zero: int) -> Bytes:
    """Return codes from -zero on as unsigned fields."""
    return (codes.astype(np.int16) + zero).astype(np.uint8)


def _q4_0(p: Parts) -> Bytes:
    return np.concatenate([half(p.d[:, None]), gather(_fields(p.codes, 8), 16, 4)], axis=1)


def _q5_0(p: Parts) -> Bytes:
    fields = _fields(p.codes, 16)
    high = np.packbits(fields >> 4, axis=1, bitorder="little")
    return np.concatenate([half(p.d[:, None]), high, gather(fields & 15, 16, 4)], axis=1)


def _q8_0(p: Parts) -> Bytes:
    return np.concatenate([half(p.d[:, None]), p.codes.astype(np.int8).view(np.uint8)], axis=1)


def _q4_k(p: Parts) -> Bytes:
    assert p.factors is not None and p.min_factors is not None and p.dmin is not None
    packed = _six_bits(p.factors.astype(np.uint8), p.min_factors.astype(np.uint8))
    return np.concatenate(
        [half(p.d[:, None]), half(p.dmin[:, None]), packed, gather(_fields(p.codes, 0), 32, 4)], axis=1
    )


def _q6_k(p: Parts) -> Bytes:
    assert p.factors is not None
    fields = _fields(p.codes, 32)
    low, high = gather(fields & 15, 64, 4), gather(fields >> 4, 32, 2)
    return np.concatenate([low, high, p.factors.astype(np.int8).view(np.uint8), half(p.d[:, None])], axis=1)


def _six_bits(scales: Bytes, minima: Bytes) -> Bytes:
    """Return the 12 bytes that `codes.six_bits` reads."""
    low = scales[:, :4] | scales[:, 4:] >> 4 << 6
    middle = minima[:, :4] | minima[:, 4:] >> 4 << 6
    return np.concatenate([low, middle, scales[:, 4:] & 15 | (minima[:, 4:] & 15) << 4], axis=1)


_PACK: Mapping[str, Callable[[Parts], Bytes]] = MappingProxyType({
    "Q8_0": _q8_0, "Q4_0": _q4_0, "Q5_0": _q5_0, "Q4_K": _q4_k, "Q6_K": _q6_k,
})  # fmt: skip
