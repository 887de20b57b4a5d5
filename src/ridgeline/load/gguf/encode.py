"""Quantize float32 rows into the blocks of GGUF types.

F16, BF16, Q4_0, Q5_0 and Q8_0 give the same bytes as the `gguf` package, which rounds as ggml does. Q4_K and Q6_K are
searched (encode_k.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np

from ridgeline.load.gguf.blocks import TYPES, BlockType
from ridgeline.load.gguf.codes import Bytes, Floats, Parts
from ridgeline.load.gguf.encode_k import inverse, q4_k, q6_k
from ridgeline.load.gguf.pack import half, pack

_CHUNK = 1 << 20  # weights that are quantized at once, which bounds the memory of intermediate results
_LARGEST = 1e9


def quantize(kind: BlockType, rows: Floats, importance: Floats | None = None) -> Bytes:
    """Return rows [..., columns] as bytes [..., row bytes].

    importance: weight of the squared error of each column, such as the mean square of its input, [columns]; None:
    columns count equally. Only types that are searched use it. Raises ValueError for a type that is not written, for
    rows that are no whole number of blocks, and for values that are infinite, NaN or beyond float16.
    """
    size = kind.row_bytes(rows.shape[-1])
    if kind.name not in (*_FLOATS, *_CHOOSE, *_SEARCH):
        raise ValueError(f"{kind.name} is not written; written are {', '.join((*_FLOATS, *_CHOOSE, *_SEARCH))}")
    flat = np.ascontiguousarray(rows, np.float32).reshape(-1, kind.weights)
    if not np.isfinite(flat).all():
        raise ValueError("has values that are infinite or NaN")
    if kind.group and flat.size and (largest := float(np.abs(flat).max())) > _LARGEST:  # its square would overflow
        raise ValueError(f"has {largest:g}, which no scale in float16 can reach")
    weights = np.ones((1, kind.weights), np.float32) if importance is None else _relative(importance, kind.weights)
    out = np.empty((len(flat), kind.size), np.uint8)
    step = max(1, _CHUNK // kind.weights)
    for start in range(0, len(flat), step):
        some = flat[start : start + step]
        across = np.arange(start, start + len(some)) % len(weights)
        out[start : start + step] = _encode(kind, some, weights[across])
    return out.reshape(*rows.shape[:-1], size)


def is_searched(name: str) -> bool:
    """Return whether a type is searched, so that importance changes its codes."""
    return name in _SEARCH


def written_types() -> tuple[BlockType, ...]:
    """Return the types that are written."""
    return tuple(TYPES[name] for name in (*_FLOATS, *_CHOOSE, *_SEARCH))


def _relative(importance: Floats, width: int) -> Floats:
    """Return the importance of columns by blocks of a row, [blocks, width], with the mean 1 and none of it 0."""
    mean = float(importance.mean())
    relative = importance / np.float32(mean) if mean > 0 else np.ones_like(importance)
    return np.maximum(relative.astype(np.float32), np.float32(1e-4)).reshape(-1, width)


def _encode(kind: BlockType, blocks: Floats, weights: Floats) -> Bytes:
    if kind.name in _FLOATS:
        return _FLOATS[kind.name](blocks)
    if kind.name in _SEARCH:
        return pack(kind, _SEARCH[kind.name](blocks, weights))
    return pack(kind, _CHOOSE[kind.name](blocks))


def _f32(x: Floats) -> Bytes:
    return x.astype("<f4").view(np.uint8)


def _bf16(x: Floats) -> Bytes:
    bits = x.view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype("<u2").view(np.uint8)


def _lowest(x: Floats, steps: int) -> Parts:
    """Return scales and codes where the largest number of a block becomes the lowest code, -steps."""
    largest = np.take_along_axis(x, np.abs(x).argmax(axis=1, keepdims=True), axis=1)
    scale = largest / np.float32(-steps)
    codes = np.trunc(x * inverse(scale) + np.float32(steps + 0.5)).clip(0, 2 * steps - 1) - steps
    return Parts(codes.astype(np.int8), scale[:, 0])


def _q4_0(x: Floats) -> Parts:
    return _lowest(x, 8)


def _q5_0(x: Floats) -> Parts:
    return _lowest(x, 16)


def _q8_0(x: Floats) -> Parts:
    scale = np.abs(x).max(axis=1, keepdims=True) / np.float32(127)
    scaled = x * inverse(scale)
    magnitude = np.abs(scaled)
    floor = np.floor(magnitude)
    codes = np.sign(scaled) * (floor + np.floor(2 * (magnitude - floor)))  # halves are rounded away from zero
    return Parts(codes.astype(np.int8), scale[:, 0])


_FLOATS: Mapping[str, Callable[[Floats], Bytes]] = MappingProxyType({"F32": _f32, "F16": half, "BF16": _bf16})
_CHOOSE: Mapping[str, Callable[[Floats], Parts]] = MappingProxyType({"Q4_0": _q4_0, "Q5_0": _q5_0, "Q8_0": _q8_0})
_SEARCH: Mapping[str, Callable[[Floats, Floats], Parts]] = MappingProxyType({"Q4_K": q4_k, "Q6_K": q6_k})
