"""Read where the tensors of a GGUF model are: names, types, shapes and bytes, in one file or in several parts.

Everything is checked before a tensor is read: known types, whole blocks in each row, aligned offsets, no overlap, no
byte beyond the end of the file.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ridgeline.errors import CheckpointError
from ridgeline.load.gguf.blocks import BY_NUMBER, OTHERS, TYPES, BlockType
from ridgeline.load.gguf.header import GgufHeader, GgufValue, Reader, opened
from ridgeline.load.gguf.paths import numbered_parts

ALIGNMENT = 32  # bytes, if the file does not say
MAX_RANK = 4
_MAX_BYTES = 1 << 62


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Where a tensor is stored. shape: rows come last but one, columns last, as in numpy; the file has the reverse
    order. start, stop: bytes from the start of its file.
    """

    name: str
    file: Path
    type: BlockType
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class GgufLayout:
    """The metadata of a model, and its tensors by name, from all of its files."""

    files: tuple[Path, ...]
    metadata: Mapping[str, GgufValue]
    tensors: Mapping[str, GgufTensor]


def read_layout(path: Path) -> GgufLayout:
    """Return the layout of a model. path: the only file, or the first part of a model in several files.

    Raises CheckpointError for a damaged file, a missing part, and a type that is not supported.
    """
    header, tensors = _read_file(path)
    count = _whole(path, header.metadata, "split.count", 1)
    if count <= 1:
        return GgufLayout((path,), header.metadata, {t.name: t for t in tensors})
    paths = numbered_parts(path, count)
    found = {t.name: t for t in tensors}
    for number, part in enumerate(paths):
        if number:
            header_of_part, more = _read_file(part)
            if twice := next((t.name for t in more if t.name in found), None):
                raise CheckpointError(f"{twice} is in both {found[twice].file.name} and {part.name}")
            found |= {t.name: t for t in more}
        else:
            header_of_part = header
        if (stated := _whole(part, header_of_part.metadata, "split.no", -1)) != number:
            raise CheckpointError(f"{part} says that it is part {stated + 1}, not part {number + 1} of {count}")
    total = _whole(path, header.metadata, "split.tensors.count", len(found))
    if total != len(found):
        raise CheckpointError(f"{path} and its parts have {len(found)} tensors, but {total} were written")
    return GgufLayout(tuple(paths), header.metadata, found)


def _whole(path: Path, metadata: Mapping[str, GgufValue], key: str, default: int) -> int:
    value = metadata.get(key, default)
    if type(value) is not int:
        raise CheckpointError(f"{path}: {key} is {value!r}; it must be a whole number")
    return value


def _read_file(path: Path) -> tuple[GgufHeader, list[GgufTensor]]:
    with opened(path) as reader:
        header = reader.header()
        alignment = _whole(path, header.metadata, "general.alignment", ALIGNMENT)
        if alignment < 8 or alignment & (alignment - 1) or alignment > 1 << 20:
            raise CheckpointError(
                f"{path}: general.alignment is {alignment}; it must be a power of two from 8 to 2**20"
            )
        reader.seek(header.tensor_info_offset)
        entries = [_entry(reader) for _ in range(header.tensor_count)]
        base = -(-reader.position // alignment) * alignment
    size = path.stat().st_size
    tensors = [_placed(path, entry, base, alignment, size) for entry in entries]
    _check_apart(path, tensors)
    return header, tensors


def _entry(reader: Reader) -> tuple[str, tuple[int, ...], int, int]:
    """Return name, shape, number of the type and offset of a tensor."""
    name = reader.string("the name of a tensor")
    rank = int(reader.scalar("I"))
    if not 1 <= rank <= MAX_RANK:
        raise reader.error(f"gives {name!r} {rank} dimensions, not 1 to {MAX_RANK}; it is damaged: download it again")
    shape = tuple(int(reader.scalar("Q")) for _ in range(rank))[::-1]
    return name, shape, int(reader.scalar("I")), int(reader.scalar("Q"))


def _placed(
    path: Path, entry: tuple[str, tuple[int, ...], int, int], base: int, alignment: int, size: int
) -> GgufTensor:
    name, shape, number, offset = entry
    if number not in BY_NUMBER:
        known = ", ".join(TYPES)
        raise CheckpointError(
            f"{path}: {name} has the type {OTHERS.get(number, number)}, which is not supported; supported: {known}"
        )
    kind = BY_NUMBER[number]
    if min(shape) < 1 or math.prod(shape) > _MAX_BYTES:
        raise CheckpointError(f"{path}: {name} has the shape {list(shape)}; the file is damaged: download it again")
    try:
        length = math.prod(shape[:-1]) * kind.row_bytes(shape[-1])
    except ValueError as e:
        raise CheckpointError(
            f"{path}: {name} has the type {kind.name}, but its {e}; the file is damaged: download it again"
        ) from None
    if offset % alignment:
        raise CheckpointError(
            f"{path}: {name} begins at {offset}, which is not a multiple of {alignment}; it is damaged: "
            "download it again"
        )
    if base + offset + length > size:
        raise CheckpointError(
            f"{path}: {name} ends at byte {base + offset + length}, but the file has {size}; it is truncated "
            "or damaged: download it again"
        )
    return GgufTensor(name, path, kind, shape, base + offset, base + offset + length)


def _check_apart(path: Path, tensors: list[GgufTensor]) -> None:
    """Raise CheckpointError for two tensors with one name or with common bytes."""
    names: set[str] = set()
    end, last = 0, ""
    for tensor in sorted(tensors, key=lambda t: t.start):
        if tensor.name in names:
            raise CheckpointError(f"{path} has the tensor {tensor.name!r} twice; it is damaged: download it again")
        if tensor.start < end:
            raise CheckpointError(f"{path}: {tensor.name} and {last} share bytes; it is damaged: download it again")
        names.add(tensor.name)
        end, last = tensor.stop, tensor.name
