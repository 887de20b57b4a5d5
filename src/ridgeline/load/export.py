"""Write weights: the loader's table in the other direction, and a safetensors file that is complete or absent."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ridgeline.archs import Names
from ridgeline.load.safetensors import HostTensor, dtype_code
from ridgeline.load.stored import join_rows
from ridgeline.load.weights import part_of, stored_shape
from ridgeline.ops.api import QuantizedMatrix, QuantizedStack
from ridgeline.spec import ModelSpec

ALIGNMENT = 8  # bytes; the format's own writer aligns the header to it


def checkpoint_tensors(spec: ModelSpec, names: Names, weights: Mapping[str, HostTensor]) -> dict[str, HostTensor]:
    """Return the tensors of a family's checkpoint, by its names, from all weights of the spec, by ours.

    Weights that share a tensor (a fused matrix) must have one type; otherwise ValueError is raised.
    """
    reads = names.reads(spec)
    out: dict[str, HostTensor] = {}
    for w in spec.weights():
        host, read = weights[w.name], reads[w.name]
        for i, key in enumerate(read.keys):
            if key not in out:
                out[key] = HostTensor(np.empty(stored_shape(w, read), host.data.dtype), host.dtype)
            if out[key].dtype != host.dtype:
                raise ValueError(f"{key} would contain {out[key].dtype} and {host.dtype}; give its weights one type")
            target = part_of(out[key].data, read)
            target[...] = (host.data[i] if read.stacked else host.data).reshape(target.shape)
    return out


def write_safetensors(path: Path, tensors: Mapping[str, HostTensor]) -> None:
    """Write a safetensors file. It is written under another name first, so that no reader finds an incomplete file."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, tensor in tensors.items():
        size = tensor.data.nbytes
        header[name] = {
            "dtype": dtype_code(tensor.dtype), "shape": list(tensor.data.shape), "data_offsets": [at, at + size],
        }  # fmt: skip
        at += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    partial = path.with_name(f".{path.name}.partial")
    try:
        with partial.open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for tensor in tensors.values():
                file.write(np.ascontiguousarray(tensor.data).data)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def checkpoint_matrices(
    spec: ModelSpec, names: Names, weights: Mapping[str, QuantizedMatrix | QuantizedStack]
) -> dict[str, QuantizedMatrix]:
    """Return the matrices of a family's checkpoint, by its names, from matrices in codes by ours, in host memory.

    Raises ValueError, which names it, for a tensor that cannot hold codes (all experts in one tensor), that has parts
    in floats, or whose parts differ in format.
    """
    reads = names.reads(spec)
    found: dict[str, list[tuple[QuantizedMatrix, np.ndarray[Any, Any]]]] = {}
    totals: dict[str, int] = {}
    for w in spec.weights():
        if w.name not in weights:
            continue
        read, own = replace(reads[w.name], transpose=False), weights[w.name]
        shape = stored_shape(w, read)
        if len(shape) != 2:
            raise ValueError(
                f"{read.keys[0]} holds all experts, which no format of codes does; keep {w.name} as floats"
            )
        rows = part_of(np.arange(shape[0])[:, None], read).reshape(-1)
        matrices = [own] if isinstance(own, QuantizedMatrix) else [own[e] for e in range(own.shape[0])]
        for key, matrix in zip(read.keys, matrices, strict=True):
            found.setdefault(key, []).append((matrix, rows))
            totals[key] = shape[0]
    out: dict[str, QuantizedMatrix] = {}
    for key, parts in found.items():
        if sum(len(rows) for _, rows in parts) != totals[key]:
            raise ValueError(f"{key} has parts that are codes and others that are floats; quantize all or none")
        try:
            out[key] = join_rows([m for m, _ in parts], [rows for _, rows in parts], totals[key])
        except ValueError as e:
            raise ValueError(f"{key}: {e}") from None
    return out
