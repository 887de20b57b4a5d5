"""The formats of checkpoints in which a quantized model can be written."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ridgeline.compress.result import Quantized
from ridgeline.errors import RequestError
from ridgeline.load.export import checkpoint_tensors, write_safetensors
from ridgeline.load.hub import SMALL_FILES
from ridgeline.load.safetensors import HostTensor
from ridgeline.spec.quant import Format


@dataclass(frozen=True)
class Writer:
    """A format of checkpoints.

    refuses: returns why it cannot hold matrices of a format; None if it can. permutes: whether it holds the order of
    columns of a matrix. write: writes weights and config.json into a folder that does not exist.
    """

    refuses: Callable[[Format], str | None]
    permutes: bool
    write: Callable[[Path, Quantized], None]


def _write_floats(folder: Path, quantized: Quantized) -> None:
    """Write the numbers of all matrices in float32, which every tool reads. The model is in memory once."""
    original = quantized.original
    weights = {
        w.name: HostTensor(np.asarray(quantized.floats(w.name), np.float32), "float32") for w in original.spec.weights()
    }
    folder.mkdir()
    tensors = checkpoint_tensors(original.spec, original.checkpoint.family.names, weights)
    write_safetensors(folder / "model.safetensors", tensors)
    config = {k: v for k, v in original.checkpoint.config.items() if k not in ("dtype", "torch_dtype")}
    (folder / "config.json").write_text(json.dumps({**config, "dtype": "float32"}, indent=2), encoding="utf-8")


# Name -> format, the default first.
WRITERS: Mapping[str, Writer] = {
    "floats": Writer(lambda format: None, True, _write_floats),
}


def writer_of(name: str, format: Format) -> Writer:
    """Return the writer of a format. Raises RequestError if it is not known or cannot hold the matrices."""
    writer = WRITERS.get(name)
    if writer is None:
        raise RequestError(f"format (--format) {name!r} is not known; known are {', '.join(WRITERS)}")
    if reason := writer.refuses(format):
        able = [other for other, w in WRITERS.items() if w.refuses(format) is None]
        raise RequestError(f"format (--format) {name} cannot hold {format.name}: {reason}; {', '.join(able)} can")
    return writer


def copy_small_files(source: Path, folder: Path) -> None:
    """Copy the tokenizer, the chat template and what else a model's folder has besides config.json and weights."""
    for pattern in SMALL_FILES:
        for path in source.glob(pattern):
            if path.is_file() and path.name != "config.json":
                shutil.copyfile(path, folder / path.name)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON file."""
    path.write_text(json.dumps(value, indent=2, allow_nan=False) + "\n", encoding="utf-8")
