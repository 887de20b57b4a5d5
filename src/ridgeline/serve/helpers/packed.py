"""Send a parsed body from a helper process: long texts and lists as bytes, the rest as small JSON.

Rebuilding a text of megabytes from bytes takes milliseconds. Parsing it as JSON would block all other threads.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Any

LONG = 1024  # characters of a text or a list of texts, or elements of a list of numbers, that are sent as bytes


def _texts(data: bytes) -> list[str]:
    (count,) = array("q", data[:8])
    found, at = [], 8 * (count + 1)
    for size in array("q", data[8:at]):
        found.append(data[at : at + size].decode("utf-8", "surrogatepass"))
        at += size
    return found


_KINDS: dict[str, Callable[[bytes], Any]] = {
    "text": lambda data: data.decode("utf-8", "surrogatepass"),
    "texts": _texts,
    "integers": lambda data: array("q", data).tolist(),
    "numbers": lambda data: array("d", data).tolist(),
}


def pack(value: Any) -> tuple[Any, ...]:
    """Return the value without its long parts, then their paths and kinds, then the bytes of each."""
    paths: list[list[Any]] = []
    blobs: list[bytes] = []

    def take(part: Any, path: list[str | int]) -> Any:
        if (kind := _kind(part)) is not None:
            paths.append([path, kind])
            blobs.append(_bytes(part, kind))
            return None
        if isinstance(part, dict):
            return {key: take(inner, [*path, key]) for key, inner in part.items()}
        if isinstance(part, list):
            return [take(inner, [*path, index]) for index, inner in enumerate(part)]
        return part

    return take({"": value}, []), paths, *blobs


def unpack(parts: Sequence[Any]) -> Any:
    """Return the value from the parts that `pack` made."""
    holder, paths, *blobs = parts
    for (path, kind), data in zip(paths, blobs, strict=True):
        inside = holder
        for step in path[:-1]:
            inside = inside[step]
        inside[path[-1]] = _KINDS[kind](data)
    return holder[""]


def _kind(part: Any) -> str | None:
    if isinstance(part, str):
        return "text" if len(part) > LONG else None
    if isinstance(part, list) and all(isinstance(one, str) for one in part):
        return "texts" if sum(map(len, part)) > LONG else None
    if isinstance(part, list) and len(part) > LONG and isinstance(part[0], int | float):
        if all(type(i) is int and -(1 << 63) <= i < 1 << 63 for i in part):
            return "integers"
        return "numbers" if all(type(i) is float for i in part) else None
    return None


def _bytes(part: Any, kind: str) -> bytes:
    if kind == "text":
        return str(part).encode("utf-8", "surrogatepass")
    if kind == "texts":
        texts = [str(one).encode("utf-8", "surrogatepass") for one in part]
        return array("q", [len(texts), *map(len, texts)]).tobytes() + b"".join(texts)
    return array("q" if kind == "integers" else "d", part).tobytes()
