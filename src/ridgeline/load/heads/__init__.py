"""Heads for speculative decoding as folders: one file for each format, and a table of them.

A head is read strictly: a field or a tensor that is unknown or missing is an error, because a head that is read wrongly
drafts worse, and nothing else shows it.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

from ridgeline.errors import CheckpointError, ConfigError, RequestError
from ridgeline.load.export import write_safetensors
from ridgeline.load.heads.eagle import Eagle
from ridgeline.load.heads.eagle3 import Eagle3, Speculators
from ridgeline.load.heads.head import HeadFile, HeadFormat
from ridgeline.load.heads.medusa import MedusaOriginal, MedusaVllm
from ridgeline.load.safetensors import SINGLE, TensorFiles
from ridgeline.spec import ModelSpec
from ridgeline.spec.cards import rank_accuracies
from ridgeline.spec.folders import read_json
from ridgeline.spec.heads import MedusaSpec

__all__ = ["FORMATS", "HeadFile", "HeadFormat", "is_head", "open_head", "read_head", "write_head"]

# In the order in which they are tried: speculators' tensors are named as those of EAGLE-3.
_ALL: tuple[HeadFormat, ...] = (Speculators(), MedusaOriginal(), MedusaVllm(), Eagle3(), Eagle())
FORMATS = {format.name: format for format in _ALL}
PICKLED = (".bin", ".pt", ".pth")
CONVERT = (
    'convert it where you trust it: python -c "import torch; from safetensors.torch import save_file; '
    "save_file({{k: v.contiguous().clone() for k, v in torch.load('{0}', weights_only=True).items()}}, '{1}')\""
)


def open_head(folder: Path, target: ModelSpec) -> HeadFile:
    """Read the head in a folder, for a target. Raises CheckpointError for one of another model, and as `read_head`."""
    head = read_head(folder)
    if (problem := head.spec.misfit(target)) is not None:
        raise CheckpointError(f"{folder}: {problem}")
    return replace(head, accuracies=rank_accuracies(folder)) if isinstance(head.spec, MedusaSpec) else head


def is_head(folder: Path) -> bool:
    """Return whether a folder has a head of a known format, and not a model. Raises CheckpointError."""
    config = read_json(folder / "config.json")
    try:
        keys = frozenset(_files(folder))
    except CheckpointError:
        return "speculators_model_type" in config or "medusa_num_heads" in config
    return any(format.matches(config, keys) for format in _ALL)


def read_head(folder: Path) -> HeadFile:
    """Read the head in a folder. All names and shapes are checked before any number is read.

    Raises CheckpointError or ConfigError, in one line that names the folder, for a folder of no known format, a field
    or a tensor that is missing or unknown, a wrong shape, and pickled files.
    """
    config = read_json(folder / "config.json")
    try:
        files = _files(folder)
        keys = frozenset(files)
        for format in _ALL:
            if format.matches(config, keys):
                return format.read(config, files)
    except (CheckpointError, ConfigError) as e:
        raise type(e)(f"{folder}: {str(e).removeprefix(f'{folder}: ')}") from None
    except ValueError as e:  # raised by the spec's classes
        raise ConfigError(f"{folder}: config.json: {e}") from None
    raise CheckpointError(f"{folder}: no head for speculative decoding; known formats are {', '.join(FORMATS)}")


def write_head(folder: Path, head: HeadFile, format: str) -> None:
    """Write a head as a folder of a format, and read it back before config.json gets its name.

    Raises RequestError for an unknown format, and for a head that the format cannot hold.
    """
    if format not in FORMATS:
        raise RequestError(f"the format of a head {format!r:.100} is not known; known are {', '.join(FORMATS)}")
    config, tensors = FORMATS[format].write(head)
    draft = folder / ".unfinished"
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    try:
        dtype = {"dtype": next(iter(head.weights.values())).dtype}
        (draft / "config.json").write_text(json.dumps({**config, **dtype}, indent=2) + "\n", encoding="utf-8")
        write_safetensors(draft / FORMATS[format].file, tensors)
        if (found := read_head(draft).spec) != head.spec:
            raise CheckpointError(f"{folder}: the written head reads as {found}, and it was {head.spec}")
        for path in sorted(draft.iterdir(), key=lambda p: p.name == "config.json"):  # last: marks the folder complete
            path.replace(folder / path.name)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _files(folder: Path) -> TensorFiles:
    """Open the tensors of a head, of which none may be pickled."""
    for name in (SINGLE, MedusaOriginal.file):
        if (folder / name).exists():
            return TensorFiles(folder, name)
    pickled = sorted(p.name for p in folder.iterdir() if p.suffix in PICKLED) if folder.is_dir() else []
    if pickled and not (folder / f"{SINGLE}.index.json").exists():
        raise CheckpointError(
            f"{folder}: the head is pickled ({pickled[0]}), and reading such a file can run code; "
            + CONVERT.format(pickled[0], SINGLE)
        )
    return TensorFiles(folder)
