"""Find the files of a GGUF model, which may be one file or several numbered parts."""

from __future__ import annotations

import glob
import re
from pathlib import Path

from ridgeline.errors import CheckpointError

SUFFIX = ".gguf"
_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
_NAMED = 5  # files that an error lists


def is_gguf(path: Path) -> bool:
    """Return whether a path names a GGUF file and no folder."""
    return path.suffix == SUFFIX and not path.is_dir()


def only_gguf(folder: Path) -> Path | None:
    """Return the GGUF model of a folder without safetensors: its file or the first of its parts; None if it has none.

    Raises CheckpointError, which names them, if there are several.
    """
    files = [p for p in sorted(folder.glob(f"*{SUFFIX}")) if p.is_file()]
    found = [p for p in files if not (match := _PART.fullmatch(p.name)) or int(match[2]) == 1]
    if not found or any(folder.glob("*.safetensors")):
        return None
    if len(found) > 1:
        more = f" and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
        names = ", ".join(p.name for p in found[:_NAMED])
        raise CheckpointError(f"{folder} has several GGUF files; give the path of one of them: {names}{more}")
    return found[0]


def parts_of(path: Path) -> list[Path]:
    """Return the files of a model that exist, by their names. path: the only file, or the first part."""
    match = _PART.fullmatch(path.name)
    return sorted(path.parent.glob(f"{glob.escape(match[1])}-?????-of-{match[3]}.gguf")) if match else [path]


def numbered_parts(path: Path, count: int) -> list[Path]:
    """Return the names of all parts of a model in `count` files. path: the first part.

    Raises CheckpointError if the path is another part, or a part is missing.
    """
    match = _PART.fullmatch(path.name)
    if not match or int(match[3]) != count:
        raise CheckpointError(f"{path} is a part of {count}; name it NAME-00001-of-{count:05d}.gguf")
    if int(match[2]) != 1:
        raise CheckpointError(f"{path} is part {int(match[2])} of {count}; give the first part")
    paths = [path.with_name(f"{match[1]}-{i:05d}-of-{count:05d}.gguf") for i in range(1, count + 1)]
    if missing := [p.name for p in paths if not p.exists()]:
        raise CheckpointError(f"{path} is a model in {count} files, and {missing[0]} is missing; download it again")
    return paths
