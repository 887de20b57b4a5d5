"""The formats of checkpoints in which a quantized model can be written."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ridgeline.compress import gguf
from ridgeline.compress.result import Quantized
from ridgeline.compress.scheme import Scheme
from ridgeline.compress.tensors import matrices, plain
from ridgeline.errors import RequestError
from ridgeline.load.export import checkpoint_tensors, write_safetensors
from ridgeline.load.gguf.write import EncodedRows, write_gguf
from ridgeline.load.hub import SMALL_FILES
from ridgeline.load.packed.write import WRITERS as PACKED
from ridgeline.load.packed.write import write_checkpoint
from ridgeline.load.safetensors import HostTensor
from ridgeline.load.tokenizer import Tokenizer, has_tokenizer
from ridgeline.ops.arrays import QuantizedMatrix
from ridgeline.spec.quant import NUMBERS, Format


@dataclass(frozen=True)
class Writer:
    """A format of checkpoints.

    refuses: returns why it cannot hold a matrix; an empty text if it can. write: writes the model into a folder that
    does not exist, and returns notes for the user. The report is added by the caller.
    """

    refuses: Callable[[QuantizedMatrix], str]
    write: Callable[[Path, Quantized], tuple[str, ...]]


def _write_packed(format: str, folder: Path, quantized: Quantized) -> tuple[str, ...]:
    checkpoint = quantized.original.checkpoint
    write_checkpoint(folder, format, matrices(quantized), plain(quantized), checkpoint.config)
    copy_small_files(checkpoint.folder, folder)
    return ()


def _write_gguf(folder: Path, quantized: Quantized) -> tuple[str, ...]:
    """Write one file with weights, config, tokenizer and chat template."""
    checkpoint = quantized.original.checkpoint
    tokenizer = Tokenizer.from_folder(checkpoint.folder) if has_tokenizer(checkpoint.folder) else None
    folder.mkdir()
    return write_gguf(
        folder / "model.gguf", checkpoint.config, _Encoded(quantized), tokenizer, quantized.types,
        checkpoint.sampling_defaults,
    )  # fmt: skip


class _Encoded(Mapping[str, EncodedRows | HostTensor]):
    """The weights of a GGUF file by our names, each read when it is written."""

    def __init__(self, quantized: Quantized) -> None:
        self._quantized = quantized
        self._names = tuple(w.name for w in quantized.original.spec.weights())

    def __getitem__(self, name: str) -> EncodedRows | HostTensor:
        return self._quantized.encoded(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _write_floats(folder: Path, quantized: Quantized) -> tuple[str, ...]:
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
    copy_small_files(original.checkpoint.folder, folder)
    return ()


GGUF = "gguf"
# Formats by name, in the order in which one is chosen.
WRITERS: Mapping[str, Writer] = {
    **{name: Writer(packed.refuses, partial(_write_packed, name)) for name, packed in PACKED.items()},
    GGUF: Writer(gguf.refuses, _write_gguf),
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


def writer_of_scheme(name: str | None, shapes: Mapping[str, tuple[int, ...]], scheme: Scheme) -> Writer:
    """Return `writer_of` the scheme's format. Raises RequestError also for columns in 16 bits outside of floats."""
    if scheme.method == "keep" and name != "floats":
        raise RequestError(
            f"scheme (--scheme) {scheme.name} keeps columns in 16 bits, which no format of quantized checkpoints can "
            "store: it is a baseline; take --format floats, which stores all numbers in 32 bits"
        )
    return writer_of(name, shapes, scheme.format)


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
