"""Load a head for speculative decoding beside its target: read the folder, check that it fits, build it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ridgeline.load.heads import HeadFile, open_head
from ridgeline.load.safetensors import HostTensor
from ridgeline.nn.heads import AnyHead, build_head
from ridgeline.ops import api
from ridgeline.ops.api import Memory
from ridgeline.ops.table import COMPOSED
from ridgeline.runtime.load import LoadedModel, check_memory
from ridgeline.spec import Weight
from ridgeline.spec.dtype import DTYPE_NAMES, DType
from ridgeline.spec.footprint import footprint
from ridgeline.spec.heads import HeadSpec, MedusaSpec
from ridgeline.spec.quant import FormatTable, format_of


@dataclass(frozen=True, slots=True)
class LoadedHead:
    """A head that is ready to run. max_model_len: longest context for which it drafts. weight_bytes: bytes of its
    weights in memory. mapped_bytes: bytes of weights that become resident when they are used.
    """

    head: AnyHead
    file: HeadFile
    max_model_len: int
    weight_bytes: int
    mapped_bytes: int = 0

    @property
    def spec(self) -> HeadSpec:
        return self.file.spec


def load_head(folder: Path, target: LoadedModel, weights: str = "auto", dtype: DType | None = None) -> LoadedHead:
    """Load the head in a folder onto the device of its target.

    Args:
        weights: format of its matrices, as in LoadOptions.
        dtype: type of the matrices of floats; None: as they are stored.

    Raises:
        CheckpointError, ConfigError: for a folder that cannot be read, and for a head of another model.
        DeviceError: if its weights do not fit into memory, before they are read.
        RequestError: for an unknown format of matrices.
    """
    return prepare_head(open_head(folder, target.spec), target, weights, dtype)


def prepare_head(file: HeadFile, target: LoadedModel, weights: str = "auto", dtype: DType | None = None) -> LoadedHead:
    """Put a head that was read onto the device of its target; see `load_head`."""
    file = _shared(file, target)
    table, formats = target.table, FormatTable(format_of(weights))
    packs = table.choose(api.PRODUCT, formats.default).backend != COMPOSED
    kinds = {w.name: dtype or DTYPE_NAMES[file.weights[w.name].dtype] for w in file.spec.weights()}
    need = footprint(file.spec, formats, dtype or "float32", packs=packs, dtypes=kinds).total
    check_memory(need, table)
    arrays = {w.name: _put(file.weights[w.name], w, table.memory, dtype) for w in file.spec.weights()}
    head = build_head(file.spec, arrays, target.model, table, target.max_model_len, file.vocabulary, formats)
    length = target.max_model_len
    if not isinstance(file.spec, MedusaSpec):
        length = min(length, file.spec.max_position_embeddings)
    return LoadedHead(head, file, length, need)


def _put(tensor: HostTensor, weight: Weight, memory: Memory, dtype: DType | None) -> Any:
    return memory.put(tensor.data, tensor.dtype, (dtype or tensor.dtype) if weight.is_matrix else "float32")


def _shared(file: HeadFile, target: LoadedModel) -> HeadFile:
    """Return the head without its own embedding if that has the same numbers as its target's, as it often does."""
    spec, own, theirs = file.spec, file.weights.get("embed.weight"), target.model.weights["embed.weight"]
    if isinstance(spec, MedusaSpec) or own is None or not isinstance(theirs, np.ndarray):
        return file
    if DTYPE_NAMES.get(theirs.dtype.name) != own.dtype or not np.array_equal(theirs.view(own.data.dtype), own.data):
        return file
    left = {name: tensor for name, tensor in file.weights.items() if name != "embed.weight"}
    return replace(file, spec=replace(spec, own_embedding=False), weights=left)
