"""The types of GGUF files as formats of matrices: which schemes they hold, and how matrices get them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ridgeline.compress.grid import Floats
from ridgeline.errors import CheckpointError
from ridgeline.load.gguf.blocks import TYPES, BlockType
from ridgeline.load.gguf.codes import dequantize, unpack
from ridgeline.load.gguf.encode import quantize
from ridgeline.load.gguf.pack import type_of
from ridgeline.load.gguf.stored import format_of_block, matrix_of
from ridgeline.load.gguf.write import EncodedRows, choose_types
from ridgeline.ops.arrays import QuantizedMatrix
from ridgeline.spec.quant import Format

# The type that holds the floats of a checkpoint.
_FLOATS = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


def refuses(matrix: QuantizedMatrix) -> str:
    """Return why a GGUF file cannot hold a matrix; an empty text if it can."""
    format, kind = matrix.format, type_of(matrix.format)
    if format.activations != "exact":
        return "GGUF has exact activations only; programs choose how they take them"
    if kind is None:
        return "GGUF holds symmetric int8, int5 and int4 with --group 32, and its own types such as --scheme q4_k"
    if matrix.permutation is not None:
        return "GGUF has no order of columns"
    if matrix.shape[1] % kind.weights:
        return f"blocks of {kind.weights} columns do not divide rows of {matrix.shape[1]}"
    return ""


def formats_of_types(types: Mapping[str, str]) -> dict[str, Format]:
    """Return the format of each matrix of codes, by name. types: type of each matrix by name."""
    return {name: format_of_block(TYPES[kind]) for name, kind in types.items() if not TYPES[kind].is_float}


def types_of_formats(config: Mapping[str, Any], dtype: str, formats: Mapping[str, Format]) -> dict[str, str]:
    """Return the type of each matrix by name if some have formats, and the others the type of the checkpoint."""
    types, _ = choose_types(config, _FLOATS[dtype])
    found = {name: type_of(format) for name, format in formats.items()}
    return types | {name: kind.name for name, kind in found.items() if kind is not None}


def encode_matrix(weight: Floats, format: Format, importance: Floats | None) -> QuantizedMatrix:
    """Return a matrix [out, in] in the type of GGUF that has a format.

    importance: weight of each column's error, [in]; None: all count equally. Raises ValueError for numbers that the
    type cannot hold.
    """
    kind = type_of(format)
    assert kind is not None
    return matrix_of(kind, unpack(kind, quantize(kind, weight, importance)))


def num_bytes(shapes: Mapping[str, tuple[int, ...]], types: Mapping[str, str]) -> int:
    """Return the bytes of tensors. shapes: shape of each weight by name. types: type of each matrix; others are F32."""
    total = 0
    for name, shape in shapes.items():
        kind = TYPES[types.get(name, "F32")]
        total += int(np.prod(shape[:-1], dtype=np.int64)) * kind.row_bytes(shape[-1])
    return total


class Others:
    """The matrices of a GGUF file besides those that are quantized part by part: the head, the embedding, floats.

    Each is encoded once, and kept in a folder.

    Args:
        types: type of each matrix by name. All others are F32.
    """

    def __init__(self, folder: Path, types: Mapping[str, str]) -> None:
        self._folder, self._types = folder, types

    def __contains__(self, name: str) -> bool:
        return self._types.get(name, "F32") != "F32"

    def floats(self, name: str, weight: Any) -> Floats:
        """Return the numbers that the file will have for a weight, float32. Raises as `rows`."""
        return dequantize(TYPES[self._types[name]], np.asarray(self.rows(name, weight).rows))

    def rows(self, name: str, weight: Any) -> EncodedRows:
        """Return a weight [..., columns] as rows of blocks. Raises CheckpointError for numbers that do not fit."""
        kind, path = TYPES[self._types[name]], self._folder / f"{name}.npy"
        if not path.is_file():
            encoded = _encoded(kind, name, weight)
            unfinished = path.with_suffix(".tmp")
            with unfinished.open("wb") as file:
                np.save(file, encoded, allow_pickle=False)
            unfinished.replace(path)
        return EncodedRows(kind.name, np.load(path, mmap_mode="r", allow_pickle=False))


def _encoded(kind: BlockType, name: str, weight: Any) -> np.ndarray[Any, Any]:
    try:
        return quantize(kind, np.asarray(weight, np.float32))
    except ValueError as e:
        raise CheckpointError(f"{name} cannot be written as {kind.name}: it {e}") from None
