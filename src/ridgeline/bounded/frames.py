"""Read and write messages between a process and its helper: values as JSON or raw bytes, each after its length.

Nothing is pickled: a helper that hostile input has taken over can send wrong values, but cannot run code here.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from typing import IO, Any, TypeAlias

Value: TypeAlias = Any  # bytes, or a value of JSON

_COUNT = struct.Struct("<I")
_PART = struct.Struct("<cQ")
_MOST_PARTS = 1 << 16


class FrameTooLarge(Exception):
    """A message exceeds the size that its reader allows."""


def encode(values: Sequence[Value]) -> list[bytes]:
    """Return the parts of a message. Raises TypeError or ValueError for a value that is neither JSON nor bytes."""
    parts = [_COUNT.pack(len(values))]
    for value in values:
        raw = isinstance(value, bytes | bytearray | memoryview)
        data = bytes(value) if raw else json.dumps(value, separators=(",", ":")).encode("ascii")
        parts += _PART.pack(b"b" if raw else b"j", len(data)), data
    return parts


def write_frame(file: IO[bytes], parts: Sequence[bytes]) -> None:
    """Write a message and flush it."""
    for part in parts:
        file.write(part)
    file.flush()


def read_frame(file: IO[bytes], most_bytes: int | None = None) -> list[Value]:
    """Read one message. Raises EOFError if the pipe is closed, FrameTooLarge for more than `most_bytes`."""
    (count,) = _COUNT.unpack(_exactly(file, _COUNT.size))
    if count > _MOST_PARTS:
        raise FrameTooLarge
    values, size = [], 0
    for _ in range(count):
        kind, length = _PART.unpack(_exactly(file, _PART.size))
        size += length
        if most_bytes is not None and size > most_bytes:
            raise FrameTooLarge
        data = _exactly(file, length)
        values.append(data if kind == b"b" else json.loads(data))
    return values


def _exactly(file: IO[bytes], size: int) -> bytes:
    data = file.read(size)
    if len(data) < size:
        raise EOFError
    return data
