"""Quantize float32 rows into the blocks of GGUF types.

F16, BF16, Q4_0, Q5_0 and Q8_0 give the same bytes as the `gguf` package, which rounds as ggml does. Q4_K and Q6_K are
searched (encode_k.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np

from ridgeline.load.gguf.blocks import BlockType
from ridgeline.load.gguf.codes import Bytes, Floats, gather
from ridgeline.load.gguf.encode_k import half, inverse, q4_k, q6_k

_CHUNK = 1 << 20  # weights that are quantized at once, which bounds the memory of intermediate results
_LARGEST = 1e9


def quantize(kind: BlockType, rows: Floats) -> Bytes:
    """Return rows [..., columns] as bytes [..., row bytes]. Raises ValueError for a type that is not written, for rows
    that are no whole number of blocks, and for values that are infinite, NaN or beyond float16.
    """
    size = kind.row_bytes(rows.shape[-1])
    if kind.name not in _ENCODE:
        raise ValueError(f"{kind.name} is not written; written are {', '.join(_ENCODE)}")
    flat = np.ascontiguousarray(rows, np.float32).reshape(-1, kind.weights)
    if not np.isfinite(flat).all():
        raise ValueError("has values that are infinite or NaN")
    if kind.group and flat.size and (largest := float(np.abs(flat).max())) > _LARGEST:  # its square would overflow
        raise ValueError(f"has {largest:g}, which no scale in float16 can reach")
    out = np.empty((len(flat), kind.size), np.uint8)
    step = max(1, _CHUNK // kind.weights)
    for start in range(0, len(flat), step):
        out[start : start + step] = _ENCODE[kind.name](flat[start : start + step])
    return out.reshape(*rows.shape[:-1], size)


def _f32(x: Floats) -> Bytes:
    return x.astype("<f4").view(np.uint8)


def _f16(x: Floats) -> Bytes:
    return half(x)


def _bf16(x: Floats) -> Bytes:
    bits = x.view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype("<u2").view(np.uint8)


def _lowest(x: Floats, steps: int) -> tuple[Floats, Bytes]:
    """Return scales and codes where the largest number of a block becomes the lowest code, which is code 0."""
    largest = np.take_along_axis(x, np.abs(x).argmax(axis=1, keepdims=True), axis=1)
    scale = largest / np.float32(-steps)
    codes = np.trunc(x * inverse(scale) + np.float32(steps + 0.5))
    return scale, codes.clip(0, 2 * steps - 1).astype(np.uint8)


def _q4_0(x: Floats) -> Bytes:
    scale, codes = _lowest(x, 8)
    return np.concatenate([half(scale), gather(codes, 16, 4)], axis=1)


def _q5_0(x: Floats) -> Bytes:
    scale, codes = _lowest(x, 16)
    high = np.packbits(codes >> 4, axis=1, bitorder="little")
    return np.concatenate([half(scale), high, gather(codes & 15, 16, 4)], axis=1)


def _q8_0(x: Floats) -> Bytes:
    scale = np.abs(x).max(axis=1, keepdims=True) / np.float32(127)
    scaled = x * inverse(scale)
    magnitude = np.abs(scaled)
    floor = np.floor(magnitude)
    codes = np.sign(scaled) * (floor + np.floor(2 * (magnitude - floor)))  # halves are rounded away from zero
    return np.concatenate([half(scale), codes.astype(np.int8).view(np.uint8)], axis=1)


_ENCODE: Mapping[str, Callable[[Floats], Bytes]] = MappingProxyType({
    "F32": _f32, "F16": _f16, "BF16": _bf16, "Q4_0": _q4_0, "Q5_0": _q5_0, "Q8_0": _q8_0, "Q4_K": q4_k, "Q6_K": q6_k,
})  # fmt: skip
