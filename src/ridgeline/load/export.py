"""Weights out: the loader's table read backwards, and a safetensors file that is whole or not there."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ridgeline.archs import Names
from ridgeline.load.safetensors import HostTensor, dtype_code
from ridgeline.load.weights import part_of, stored_shape
from ridgeline.spec import ModelSpec

ALIGNMENT = 8  # of the header, in bytes, as the format's own writer has it


def checkpoint_tensors(spec: ModelSpec, names: Names, weights: Mapping[str, HostTensor]) -> dict[str, HostTensor]:
    """The tensors of a family's checkpoint, by its names, from all weights of the spec, by ours.

    A tensor that several weights share (a fused matrix) is in their common type. ValueError if those differ.
    """
    reads = names.reads(spec)
    out: dict[str, HostTensor] = {}
    for w in spec.weights():
        host, read = weights[w.name], reads[w.name]
        for i, key in enumerate(read.keys):
            if key not in out:
                out[key] = HostTensor(np.empty(stored_shape(w, read), host.data.dtype), host.dtype)
            if out[key].dtype != host.dtype:
                raise ValueError(f"{key} would hold {out[key].dtype} and {host.dtype}")
            place = part_of(out[key].data, read)
            place[...] = (host.data[i] if read.stacked else host.data).reshape(place.shape)
    return out


def write_safetensors(path: Path, tensors: Mapping[str, HostTensor]) -> None:
    """Write a file that other programs read; under another name first, so that a half-written one is never seen."""
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
