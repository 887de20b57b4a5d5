"""Compute the fingerprint of a model: its files, and the options that affect its outputs."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path

from ridgeline.load.gguf.paths import is_gguf, parts_of

WHOLE_FILE, BLOCK, BLOCKS = 1 << 25, 1 << 16, 64  # bytes; of a longer file, its size and samples of it are hashed


def model_fingerprint(folder: Path, patterns: Sequence[str], *, size: int = 4, **options: object) -> str:
    """Return a hash of `size` bytes, in hex, over a model's matching files and options. folder: or a GGUF file."""
    digest = blake2b(json.dumps(options, sort_keys=True).encode(), digest_size=size)
    found = {path for pattern in patterns for path in folder.glob(pattern) if path.is_file()}
    for path in parts_of(folder) if is_gguf(folder) else sorted(found):
        with path.open("rb") as file:
            length = os.fstat(file.fileno()).st_size
            digest.update(f"{path.name} {length}\n".encode())
            if length <= WHOLE_FILE:
                digest.update(file.read())
            else:
                for i in range(BLOCKS):
                    file.seek(i * (length - BLOCK) // (BLOCKS - 1))
                    digest.update(file.read(BLOCK))
    return digest.hexdigest()
