"""Quantized matrices of a GGUF model, as codes."""

from __future__ import annotations

from functools import partial

import numpy as np

from ridgeline.load.gguf.blocks import BlockType
from ridgeline.load.gguf.files import GGUFFiles
from ridgeline.load.stored import Stored
from ridgeline.ops.api import QuantizedMatrix
from ridgeline.spec.quant import Format, code_range, whole_numbers


def format_of_block(kind: BlockType) -> Format:
    """Return the format of a matrix in a quantized type. Levels of IQ4_NL are whole numbers of 8 bits."""
    low, high = kind.codes
    for numbers in whole_numbers():
        format = Format(numbers, kind.group)
        least, most = code_range(format)
        if least <= low and high <= most:
            return format
    raise ValueError(f"{kind.name} has codes from {low} to {high}, which no format holds")


def is_simple(kind: BlockType) -> bool:
    """Return whether each group has one float16 scale, and nothing else."""
    return not kind.is_float and kind.weights == kind.group and not kind.has_minima and kind.name != "MXFP4"


def stored_matrices(files: GGUFFiles) -> dict[str, Stored]:
    """Return the matrices of codes by their names in the file: those whose scales are float16 numbers without minima.

    The scales of other types are products, which no kernel reads as codes.
    """
    found = {}
    for name in files:
        tensor = files.info(name)
        if is_simple(tensor.type) and len(tensor.shape) > 1 and files.change(name) in (None, "pairs"):
            found[name] = Stored(format_of_block(tensor.type), tensor.shape, (name,), partial(_read, files, name))
    return found


def _read(files: GGUFFiles, name: str, index: int) -> QuantizedMatrix:
    """Return a matrix, or the one with an index in a stack."""
    tensor = files.info(name)
    codes = files.codes(name, index if len(tensor.shape) == 3 else None)
    return QuantizedMatrix(format_of_block(tensor.type), codes.codes, np.ascontiguousarray(codes.scales, np.float32))
