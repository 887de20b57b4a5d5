"""Write checkpoints whose matrices are stored as codes, and read each back before the folder gets its name."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ridgeline.archs.config import Config
from ridgeline.archs.quantization import METHODS, Quantization
from ridgeline.errors import CheckpointError, RequestError
from ridgeline.load.export import write_safetensors
from ridgeline.load.packed import READERS, awq, bitsandbytes, compressed_write, gptq
from ridgeline.load.safetensors import SINGLE, HostTensor, TensorFiles
from ridgeline.load.stored import dequantized
from ridgeline.ops.api import QuantizedMatrix


@dataclass(frozen=True, slots=True)
class Writer:
    """A format that checkpoints are written in.

    Attributes:
        refuses: returns why the format cannot hold a matrix; an empty text if it can.
        write: returns the tensors of a module's matrix.
        config: returns the quantization_config for matrices by module, and for the modules that stay floats. It raises
            RequestError for matrices that one config cannot describe.
        loaders: the programs that read it, for users.
    """

    refuses: Callable[[QuantizedMatrix], str]
    write: Callable[[str, QuantizedMatrix], Mapping[str, HostTensor]]
    config: Callable[[Mapping[str, QuantizedMatrix], Sequence[str]], dict[str, Any]]
    loaders: str


_GPTQ_LOADERS = "transformers with GPTQModel, vLLM, SGLang"
WRITERS: Mapping[str, Writer] = {
    "compressed-tensors": Writer(
        compressed_write.refuses, compressed_write.write, compressed_write.config,
        "transformers with compressed-tensors; vLLM and SGLang, but 3 bits only here and in transformers",
    ),
    "awq": Writer(awq.refuses, awq.write, awq.config, "vLLM, SGLang, transformers with GPTQModel"),
    "gptq": Writer(gptq.refuses_v1, gptq.write_v1, gptq.config_v1, _GPTQ_LOADERS),
    "gptq_v2": Writer(gptq.refuses, gptq.write, gptq.config, "transformers with GPTQModel, vLLM"),
    "bitsandbytes": Writer(
        bitsandbytes.refuses_int8, bitsandbytes.write_int8, bitsandbytes.config_int8, "transformers, vLLM"
    ),
}  # fmt: skip


def check_format(format: str, matrices: Mapping[str, QuantizedMatrix]) -> Writer:
    """Return the writer of a format. Raises RequestError, which says which others can, for one that cannot hold all."""
    if format not in WRITERS:
        raise RequestError(f"format (--format) {format!r} is not known; known are {', '.join(WRITERS)}")
    for name, matrix in matrices.items():
        if reason := WRITERS[format].refuses(matrix):
            able = [other for other, writer in WRITERS.items() if not writer.refuses(matrix)]
            remedy = f"take --format {' or '.join(able)}" if able else "no format that is written here holds it"
            raise RequestError(f"{name} in {matrix.format.name} does not fit format {format}: {reason}; {remedy}")
    return WRITERS[format]


def write_checkpoint(
    folder: Path, format: str, matrices: Mapping[str, QuantizedMatrix], plain: Mapping[str, HostTensor],
    config: Mapping[str, Any],
) -> None:  # fmt: skip
    """Write a folder with model.safetensors and config.json, and read it back. It is complete or absent.

    Args:
        folder: must not exist.
        format: a name in WRITERS.
        matrices: by the names of the unpacked checkpoint, `MODULE.weight`, with arrays in host memory.
        plain: all other tensors, by their names.
        config: the model's config.json; its quantization_config is replaced.

    Raises:
        RequestError: for a folder that exists, and for a format that cannot hold a matrix.
        CheckpointError: for a matrix that is read back differently.
    """
    if not matrices:
        raise RequestError("no matrix is quantized; give at least one")
    writer = check_format(format, matrices)
    if folder.exists():
        raise RequestError(f"{folder} exists; give a folder that does not")
    by_module = {name.removesuffix(".weight"): matrix for name, matrix in matrices.items()}
    kept = [name.removesuffix(".weight") for name, t in plain.items() if name.endswith(".weight") and t.data.ndim == 2]
    own = writer.config(by_module, kept)
    tensors = dict(plain)
    for module, matrix in by_module.items():
        tensors.update(writer.write(module, matrix))
    with _folder(folder) as partial:
        write_safetensors(partial / SINGLE, tensors)
        _compare(partial, own, matrices)
        text = json.dumps({**config, "quantization_config": own}, indent=2)
        (partial / "config.json").write_text(text + "\n", encoding="utf-8")


def _compare(folder: Path, config: dict[str, Any], matrices: Mapping[str, QuantizedMatrix]) -> None:
    """Raise CheckpointError unless the readers return the matrices that were written."""
    scheme: Quantization = METHODS[config["quant_method"]](Config(config))
    found = READERS[type(scheme)](scheme, TensorFiles(folder)).stored
    if set(found) != set(matrices):
        raise CheckpointError(f"{folder.name} has other matrices than were written")
    for name, stored in found.items():
        back, matrix = stored.read(0), matrices[name]
        same = back.format == matrix.format and back.input_scale == matrix.input_scale
        if not same or not np.array_equal(dequantized(back), dequantized(matrix)):
            raise CheckpointError(f"{name} is read back differently from what was written; nothing is kept")


@contextmanager
def _folder(folder: Path) -> Iterator[Path]:
    """Give a folder to write into, which gets its name when all is written, and is removed if something fails."""
    partial = folder.with_name(f".{folder.name}.partial-{os.getpid()}")
    partial.mkdir(parents=True)
    try:
        yield partial
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
