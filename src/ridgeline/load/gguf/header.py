"""Read the header and the metadata of a GGUF file strictly. The tensors are read by `layout.py` and `files.py`.

The layout follows the GGUF specification of the ggml project, versions 2 and 3, little-endian. Every length and count
is checked against the remaining bytes before it is used, so a truncated or damaged file gives a CheckpointError and not
a huge allocation.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from ridgeline.errors import CheckpointError
from ridgeline.spec.folders import check_regular

GgufValue: TypeAlias = "bool | int | float | str | list[GgufValue]"

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 10: "Q", 11: "q", 12: "d"}
_BOOL, _STRING, _ARRAY = 7, 8, 9
_MIN_PAIR = 8 + 1 + 4 + 1  # key length, a one-byte key, the value type, a one-byte value
_MIN_TENSOR = 8 + 1 + 4 + 4 + 8  # name length, a one-byte name, rank 0, the type, the offset
_MAX_KEY = 65535  # the specification's limit
_MAX_DEPTH = 4  # nested arrays are legal, but files in use have none


@dataclass(frozen=True)
class GgufHeader:
    """The part of the file before the tensors: version, number of tensors, metadata, and where the tensor
    infos begin.
    """

    version: int
    tensor_count: int
    metadata: dict[str, GgufValue]
    tensor_info_offset: int


def read_header(path: Path) -> GgufHeader:
    """Return the header and the metadata of the GGUF file at `path`.

    Raises CheckpointError if the file cannot be read, is not a GGUF file, has a version other than 2 or 3, is
    big-endian or truncated, or contains a value that the format does not allow.
    """
    with opened(path) as reader:
        return reader.header()


@contextmanager
def opened(path: Path) -> Iterator[Reader]:
    """Return a reader at the start of a GGUF file. Raises CheckpointError if the file cannot be read."""
    try:
        check_regular(path)
        with path.open("rb") as file:
            if path.stat().st_size == 0:
                raise CheckpointError(f"{path} is empty; copy or download the GGUF file again")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                yield Reader(data, str(path))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror or error}); check the path") from error


class Reader:
    """A position in a mapped file. Every read checks its size first."""

    def __init__(self, data: mmap.mmap, name: str) -> None:
        self._data = data
        self._size = len(data)
        self._name = name
        self._at = 0

    @property
    def position(self) -> int:
        """Return the next byte to read."""
        return self._at

    def seek(self, position: int) -> None:
        """Continue at a byte, such as `tensor_info_offset`."""
        self._at = position

    def header(self) -> GgufHeader:
        """Read everything before the tensors."""
        magic = bytes(self._data[:4])
        if magic != _MAGIC:
            raise self.error(f"does not start with 'GGUF' but with {magic!r}; it is not a GGUF file")
        self._at = 4
        version = self.scalar("I")
        if version not in _VERSIONS:
            raise self.error(self._version_message(int(version)))
        tensors, pairs = int(self.scalar("Q")), int(self.scalar("Q"))
        self._check_count("key-value pairs", pairs, _MIN_PAIR)
        metadata: dict[str, GgufValue] = {}
        for _ in range(pairs):
            key = self._key()
            if key in metadata:
                raise self.error(f"has the key {key!r} twice; convert the model again")
            metadata[key] = self._value(int(self.scalar("I")), key, 0)
        self._check_count("tensors", tensors, _MIN_TENSOR)
        return GgufHeader(int(version), tensors, metadata, self._at)

    @staticmethod
    def _version_message(version: int) -> str:
        if version & 0xFFFF == 0 and version >> 16:
            return "is big-endian; convert the model again on (or for) a little-endian machine"
        return f"is GGUF version {version}, but only versions 2 and 3 are supported; convert the model again"

    def _value(self, kind: int, key: str, depth: int) -> GgufValue:
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        if kind == _BOOL:
            return self._bools(1, key)[0]
        if kind == _STRING:
            return self.string(f"the value of {key!r}")
        if kind == _ARRAY:
            return self._array(key, depth)
        raise self.error(f"has a value of unknown type {kind} at {key!r}; the file is damaged or too new")

    def _array(self, key: str, depth: int) -> list[GgufValue]:
        if depth >= _MAX_DEPTH:
            raise self.error(f"nests arrays more than {_MAX_DEPTH} deep at {key!r}; the file is damaged")
        kind, count = int(self.scalar("I")), int(self.scalar("Q"))
        size = struct.calcsize("<" + _SCALARS[kind]) if kind in _SCALARS else {_BOOL: 1, _STRING: 8}.get(kind, 12)
        self._check_count(f"elements of {key!r}", count, size)
        if kind in _SCALARS:
            return list(struct.unpack(f"<{count}{_SCALARS[kind]}", self._take(count * size, key)))
        if kind == _BOOL:
            return list(self._bools(count, key))
        if kind == _STRING:
            what = f"an element of {key!r}"
            return [self.string(what) for _ in range(count)]
        return [self._value(kind, key, depth + 1) for _ in range(count)]

    def _bools(self, count: int, key: str) -> list[bool]:
        raw = self._take(count, key)
        if wrong := next((byte for byte in raw if byte > 1), None):
            raise self.error(f"has the byte {wrong} for a boolean at {key!r}, not 0 or 1; the file is damaged")
        return [byte == 1 for byte in raw]

    def _key(self) -> str:
        start = self._at
        key = self.string("a key")
        if not key or self._at - start - 8 > _MAX_KEY:
            raise self.error(f"has a key of {self._at - start - 8} bytes, not 1 to {_MAX_KEY}; the file is damaged")
        return key

    def string(self, what: str) -> str:
        """Read a text. what: name of the text, for the error if the file ends inside it."""
        length = int(self.scalar("Q"))
        raw = self._take(length, what)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.error(f"has invalid UTF-8 in {what}: {raw[:24]!r}; the file is damaged") from error

    def scalar(self, code: str) -> int | float:
        """Read a number in a format of `struct`."""
        raw = self._take(struct.calcsize("<" + code), "a number")
        value: int | float = struct.unpack("<" + code, raw)[0]
        return value

    def _take(self, size: int, what: str) -> bytes:
        if size > self._size - self._at:
            left = self._size - self._at
            raise self.error(f"ends inside {what}: {size} bytes needed, {left} left; it is truncated or damaged")
        raw = self._data[self._at : self._at + size]
        self._at += size
        return raw

    def _check_count(self, what: str, count: int, size: int) -> None:
        left = self._size - self._at
        if count * size > left:
            raise self.error(f"claims {count} {what} in the {left} bytes left; it is truncated or damaged")

    def error(self, text: str) -> CheckpointError:
        """Return an error that names the file and the position."""
        return CheckpointError(f"{self._name} {text} (at byte {self._at})")
