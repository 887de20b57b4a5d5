"""The formats of checkpoints in which a quantized model can be written."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ridgeline.compress.result import Quantized
from ridgeline.compress.tensors import matrices, plain
from ridgeline.errors import RequestError
from ridgeline.load.export import checkpoint_tensors, write_safetensors
from ridgeline.load.hub import SMALL_FILES
from ridgeline.load.packed.write import WRITERS as PACKED
from ridgeline.load.packed.write import write_checkpoint
from ridgeline.load.safetensors import HostTensor
from ridgeline.ops.arrays import QuantizedMatrix
from ridgeline.spec.quant import NUMBERS, Format


@dataclass(frozen=True)
class Writer:
    """A format of checkpoints.

    refuses: returns why it cannot hold a matrix; an empty text if it can. write: writes weights and config.json into a
    folder that does not exist.
    """

    refuses: Callable[[QuantizedMatrix], str]
    write: Callable[[Path, Quantized], None]


def _write_packed(format: str, folder: Path, quantized: Quantized) -> None:
    config = quantized.original.checkpoint.config
    write_checkpoint(folder, format, matrices(quantized), plain(quantized), config)


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


# Formats by name, in the order in which one is chosen.
WRITERS: Mapping[str, Writer] = {
    **{name: Writer(packed.refuses, partial(_write_packed, name)) for name, packed in PACKED.items()},
    "floats": Writer(lambda matrix: "", _write_floats),
}


def writer_of(name: str | None, shapes: Mapping[str, tuple[int, ...]], format: Format) -> Writer:
    """Return the writer of a format, or, for None, the first one that can hold all matrices.

    shapes: shapes of the matrices, by name. format: their format. Raises RequestError if the format is not known or
    cannot hold a matrix.
    """
    if name is not None and name not in WRITERS:
        raise RequestError(f"format (--format) {name!r} is not known; known are {', '.join(WRITERS)}")
    if name is None:
        return next(w for w in WRITERS.values() if all(not w.refuses(_empty(format, s)) for s in shapes.values()))
    for matrix, shape in shapes.items():
        if reason := WRITERS[name].refuses(_empty(format, shape)):
            able = [other for other, w in WRITERS.items() if not w.refuses(_empty(format, shape))]
            raise RequestError(
                f"format (--format) {name} cannot hold {matrix} in {format.name}: {reason}; {', '.join(able)} can"
            )
    return WRITERS[name]


def accepts(writer: Writer, format: Format, shape: tuple[int, ...]) -> bool:
    """Return whether a writer holds matrices of a shape in a format."""
    return not writer.refuses(_empty(format, shape))


def can_permute(writer: Writer, format: Format) -> bool:
    """Return whether a writer holds the order of columns of a matrix."""
    columns = 2 * max(32, format.group)
    return not writer.refuses(replace(_empty(format, (32, columns)), permutation=np.arange(columns)[::-1].copy()))


def _empty(format: Format, shape: tuple[int, ...]) -> QuantizedMatrix:
    """Return a matrix [..., out, in] of zeros in a format."""
    rows, columns = shape[-2:]
    groups = (rows, format.num_groups(columns))
    kind = np.uint8 if NUMBERS[format.numbers].levels else np.int8
    zero_points = np.zeros(groups, np.int8) if format.offsets == "zero_points" else None
    return QuantizedMatrix(format, np.zeros((rows, columns), kind), np.ones(groups, np.float32), zero_points)


def copy_small_files(source: Path, folder: Path) -> None:
    """Copy the tokenizer, the chat template and what else a model's folder has besides config.json and weights."""
    for pattern in SMALL_FILES:
        for path in source.glob(pattern):
            if path.is_file() and path.name != "config.json":
                shutil.copyfile(path, folder / path.name)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON file."""
    path.write_text(json.dumps(value, indent=2, allow_nan=False) + "\n", encoding="utf-8")
