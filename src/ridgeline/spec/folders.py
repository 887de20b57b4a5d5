"""Find the cache folder, write files atomically, and read text and JSON files safely."""

from __future__ import annotations

import json
import os
import stat
import sys
import tempfile
from pathlib import Path
from typing import Any

from ridgeline.errors import CheckpointError

MAX_CONFIG_BYTES = 4 << 20  # limit for a config.json; published ones have up to 100 KB


def check_regular(path: Path) -> None:
    """Raise CheckpointError for a pipe, a device or a folder, also behind a link: reading one may never end.

    Raises OSError for what is not there.
    """
    _check_kind(path, path.stat())


def read_text(path: Path, most_bytes: int) -> str:
    """Return the text of a regular file, with \\n as the end of every line.

    Raises CheckpointError for one that is larger, and for what is no regular file; OSError; ValueError for what is not
    UTF-8.
    """
    check_regular(path)
    # Without waiting: the file may have become a pipe since.
    with os.fdopen(
        os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)), "rb"
    ) as file:
        found = os.fstat(file.fileno())
        _check_kind(path, found)
        data = file.read(most_bytes + 1) if found.st_size <= most_bytes else b""
    size = max(found.st_size, len(data))
    if size > most_bytes:
        raise CheckpointError(f"{path} has {size} bytes; the limit for such a file is {most_bytes}")
    return data.decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")


def _check_kind(path: Path, found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        kinds = {stat.S_IFIFO: "a pipe", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device", stat.S_IFDIR: "a folder"}
        kind = kinds.get(stat.S_IFMT(found.st_mode), "no file with contents")
        raise CheckpointError(f"{path} is {kind}; it must be a regular file")


def existing(name: str) -> Path | None:
    """Return the path of a file or folder; None if there is none, or if the system allows no such name."""
    try:
        path = Path(name).expanduser()
        return path if path.exists() else None
    except (OSError, RuntimeError, ValueError):  # too long a name, an unknown home folder, a NUL character
        return None


def cache_folder() -> Path:
    """Return the cache folder by the platform's convention."""
    home = Path.home()
    if given := os.environ.get("XDG_CACHE_HOME"):
        base = Path(given)
    elif sys.platform == "darwin":
        base = home / "Library" / "Caches"
    elif sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA", home / "AppData" / "Local"))
    else:
        base = home / ".cache"
    return base / "ridgeline"


def write_whole(path: Path, text: str) -> None:
    """Write a file atomically: a reader sees either the old or the new file. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(file, "w", encoding="utf-8") as out:
            out.write(text)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def read_json(path: Path, most_bytes: int = MAX_CONFIG_BYTES) -> dict[str, Any]:
    """Return a JSON object from a file. Raises CheckpointError if it is missing, unreadable or something else."""
    try:
        value = json.loads(read_text(path, most_bytes))
    except FileNotFoundError:
        raise CheckpointError(f"{path.parent} has no {path.name}") from None
    except (OSError, ValueError, RecursionError) as e:
        raise CheckpointError(f"{path} is unreadable: {e}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds no JSON object")
    return value
