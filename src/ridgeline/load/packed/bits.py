"""Pack small whole numbers into bits, the first number in the lowest bits, without gaps between bytes or words."""

from __future__ import annotations

from typing import Any

import numpy as np

Ndarray = np.ndarray[Any, Any]
WORD = 32  # bits


def words(count: int, bits: int) -> int:
    """Return how many words of 32 bits `count` numbers take."""
    return -(-count * bits // WORD)


def unpack(packed: Ndarray, bits: int, count: int) -> Ndarray:
    """Return the first `count` numbers of each row, uint8 [..., count]. packed: words or bytes [..., n]."""
    data = np.ascontiguousarray(packed).view(np.uint8)
    if bits == 8:
        return data[..., :count]
    lead = data.shape[:-1]
    if bits == 4:  # both numbers of a byte move into a byte of their own: whole arrays, six times as fast as below
        wide = data.astype("<u2")
        wide |= wide << np.uint16(4)
        wide &= np.uint16(0x0F0F)
        return wide.view(np.uint8).reshape(*lead, -1)[..., :count]
    if 8 % bits == 0:
        out = np.empty((*data.shape, 8 // bits), np.uint8)
        for j in range(8 // bits):
            out[..., j] = data >> (bits * j) & (1 << bits) - 1
        return out.reshape(*lead, -1)[..., :count]
    if short := -data.shape[-1] % bits:  # every `bits` bytes hold 8 numbers
        data = np.concatenate((data, np.zeros((*lead, short), np.uint8)), -1)
    data = data.reshape(*lead, -1, bits)
    word: Any = np.uint32 if bits <= 4 else np.uint64
    joined = np.zeros(data.shape[:-1], word)
    for j in range(bits):
        joined |= data[..., j].astype(word) << word(8 * j)
    out = np.empty((*joined.shape, 8), np.uint8)
    for j in range(8):
        out[..., j] = joined >> word(bits * j) & word((1 << bits) - 1)
    return out.reshape(*lead, -1)[..., :count]


def pack(numbers: Ndarray, bits: int) -> Ndarray:
    """Return numbers [..., count] of at most `bits` bits as words, int32 [..., words(count, bits)]."""
    lead, count = numbers.shape[:-1], numbers.shape[-1]
    padded = np.zeros((*lead, -(-count // WORD) * WORD), np.uint64)
    padded[..., :count] = numbers
    padded = padded.reshape(*lead, -1, 8)
    joined = np.zeros(padded.shape[:-1], np.uint64)
    for j in range(8):
        joined |= padded[..., j] << np.uint64(bits * j)
    out = np.empty((*joined.shape, bits), np.uint8)
    for j in range(bits):
        out[..., j] = joined >> np.uint64(8 * j) & np.uint64(255)
    whole = out.reshape(*lead, -1).view("<i4")
    return np.ascontiguousarray(whole[..., : words(count, bits)])
