"""Quantized matrices of a GGUF model, as codes."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from ridgeline.load.gguf.blocks import BlockType
from ridgeline.load.gguf.codes import MXFP4, Codes
from ridgeline.load.gguf.files import GGUFFiles
from ridgeline.load.stored import Stored
from ridgeline.ops.api import QuantizedMatrix
from ridgeline.spec.quant import Format, Offsets, code_range, whole_numbers

# The code of fp4 that stands for half of a whole number from -12 to 12.
_FP4 = np.array([int(np.flatnonzero(n == MXFP4)[0]) if n in MXFP4 else 0 for n in range(-12, 13)], np.uint8)


def format_of_block(kind: BlockType) -> Format:
    """Return the format of a matrix in a quantized type. Levels of IQ4_NL are whole numbers of 8 bits."""
    if kind.name == "MXFP4":
        return Format("fp4", kind.group)
    low, high = kind.codes
    offsets: Offsets = "minimums" if kind.has_minima else "none"
    block = kind.weights if kind.weights > kind.group else 0
    for numbers in whole_numbers():
        format = Format(numbers, kind.group, offsets=offsets, block=block)
        least, most = code_range(format)
        if least <= low and high <= most:
            return format
    raise ValueError(f"{kind.name} has codes from {low} to {high}, which no format holds")


def stored_matrices(files: GGUFFiles) -> dict[str, Stored]:
    """Return the matrices of codes by their names in the file."""
    found = {}
    for name in files:
        tensor = files.info(name)
        if not tensor.type.is_float and len(tensor.shape) > 1 and files.change(name) in (None, "pairs"):
            found[name] = Stored(format_of_block(tensor.type), tensor.shape, (name,), partial(_read, files, name))
    return found


def _read(files: GGUFFiles, name: str, index: int) -> QuantizedMatrix:
    """Return a matrix, or the one with an index in a stack."""
    tensor = files.info(name)
    return matrix_of(tensor.type, files.codes(name, index if len(tensor.shape) == 3 else None))


def matrix_of(kind: BlockType, found: Codes) -> QuantizedMatrix:
    """Return a matrix [out, in] of unpacked codes. Its format says how its arrays are to be read."""
    if kind.name == "MXFP4":  # codes are twice the numbers there
        return QuantizedMatrix(format_of_block(kind), _FP4[found.codes.astype(np.intp) + 12], found.d * np.float32(2))
    codes = found.codes.view(np.uint8) if kind.has_minima else found.codes
    return QuantizedMatrix(
        format_of_block(kind), codes, np.ascontiguousarray(found.d, np.float32), minimums=found.dmin,
        factors=_factors(found.factors), min_factors=_factors(found.min_factors),
    )  # fmt: skip


def _factors(found: np.ndarray[Any, Any] | None) -> np.ndarray[Any, Any] | None:
    return None if found is None else found.astype(np.int8, copy=False)
