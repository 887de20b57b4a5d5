"""Give the weights of a quantized model the names of its family's checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ridgeline.archs import Read
from ridgeline.compress.result import Quantized
from ridgeline.errors import RequestError
from ridgeline.load.packed import open_tensors
from ridgeline.load.safetensors import HostTensor
from ridgeline.load.weights import part_of
from ridgeline.ops.arrays import QuantizedMatrix, QuantizedStack
from ridgeline.ops.host.memory import dtype_of
from ridgeline.spec.dtype import DType


def matrices(quantized: Quantized) -> dict[str, QuantizedMatrix]:
    """Return every rounded matrix by the name of its tensor in an unpacked checkpoint.

    Matrices that are the rows of one tensor become one. Raises RequestError for other layouts, in which no format of
    quantized checkpoints stores a matrix.
    """
    reads, found = _reads(quantized), dict[str, list[tuple[int, QuantizedMatrix]]]()
    for name in quantized.formats:
        read, codes = reads[name], quantized.codes(name)
        if not _is_plain(read):
            raise RequestError(
                f"{name} is part of another tensor in the checkpoints of this family, or transposed; no format of "
                "quantized checkpoints has this layout: take --format floats"
            )
        several = [codes[e] for e in range(codes.shape[0])] if isinstance(codes, QuantizedStack) else [codes]
        if len(several) != len(read.keys):
            raise RequestError(f"{name} is one tensor for all experts in the checkpoint; take --format floats")
        for key, matrix in zip(read.keys, several, strict=True):
            assert isinstance(matrix, QuantizedMatrix)
            found.setdefault(key, []).append((read.rows[0] if read.rows else 0, matrix))
    return {key: stacked(key, [m for _, m in sorted(some, key=lambda s: s[0])]) for key, some in found.items()}


def _reads(quantized: Quantized) -> Mapping[str, Read]:
    original = quantized.original
    files = open_tensors(original.checkpoint)
    names = original.checkpoint.family.names
    fitting = names.fitting(original.spec, {key.removeprefix(names.optional_prefix) for key in files})
    return fitting.reads(original.spec)


def _is_plain(read: Read) -> bool:
    parts = (read.head_part, read.every, read.group_rows, read.expert_rows)
    return not (read.transpose or read.flat or any(read.axes)) and all(part is None for part in parts)


def stacked(key: str, several: list[QuantizedMatrix]) -> QuantizedMatrix:
    """Return matrices that read one input as one matrix, one behind the other."""
    first, *rest = several
    if not rest:
        return first
    if any(m.format != first.format or m.permutation is not None for m in several):
        raise RequestError(
            f"{key} consists of several matrices with other formats or orders of columns; leave out --bits, or take "
            "another --scheme"
        )
    height = first.format.rows
    if height == 0 or any(m.shape[0] % height for m in several[:-1]):
        raise RequestError(
            f"{key} consists of several matrices, whose rows do not fill blocks of {first.format.name}; take a scheme "
            "with scales for rows, such as fp8"
        )

    def joined(name: str) -> Any:
        parts: list[Any] = [getattr(m, name) for m in several]
        return None if parts[0] is None else np.concatenate(parts)

    return QuantizedMatrix(first.format, joined("codes"), joined("scales"), joined("zero_points"))


def plain(quantized: Quantized) -> dict[str, HostTensor]:
    """Return all other tensors of the checkpoint, with those that changed in the type that they had."""
    reads, files = _reads(quantized), open_tensors(quantized.original.checkpoint)
    packed = {key for name in quantized.formats for key in reads[name].keys}
    prefix = quantized.original.checkpoint.family.names.optional_prefix
    keys = {key.removeprefix(prefix): key for key in files}
    out = {key: files.read(whole) for key, whole in keys.items() if key not in packed}
    for name, array in quantized.changed().items():
        read = reads[name]
        for i, key in enumerate(read.keys):
            old = out[key]
            new = np.array(old.data)
            part = part_of(new, read)
            own = array[i] if read.stacked else array
            part[...] = _as_stored(own, old.dtype).reshape(part.shape)
            out[key] = HostTensor(new, old.dtype)
    return out


def _as_stored(array: Any, dtype: str) -> Any:
    """Return float32 numbers in a type of a checkpoint; bfloat16 as bits."""
    kinds: Mapping[str, DType] = {"bfloat16": "bfloat16", "float16": "float16", "float32": "float32"}
    found = np.asarray(array, np.float32).astype(dtype_of(kinds[dtype]))
    return found.view(np.uint16) if dtype == "bfloat16" else found
