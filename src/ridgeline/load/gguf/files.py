"""Read the tensors of a GGUF model: views of the mapped file for floats, float32 for quantized types."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from ridgeline.errors import CheckpointError
from ridgeline.load.gguf.architectures import Architecture
from ridgeline.load.gguf.codes import Codes, dequantize, unpack
from ridgeline.load.gguf.layout import GgufLayout, GgufTensor
from ridgeline.load.safetensors import HostTensor
from ridgeline.load.stored import Stored
from ridgeline.ops.mapped import release

# The name of a float type in files -> ours, and the numpy type with the same bits.
FLOATS = {"F32": ("float32", "<f4"), "F16": ("float16", "<f2"), "BF16": ("bfloat16", "<u2")}

Array = np.ndarray[Any, Any]


class GGUFFiles:
    """The tensors of a GGUF model by their names in the file, with the values of the original checkpoint.

    `read` undoes what llama.cpp's conversion changed (architectures.py). It has the methods of TensorFiles.
    """

    def __init__(self, layout: GgufLayout, architecture: Architecture, num_heads: int, num_kv_heads: int) -> None:
        self.files = list(layout.files)
        self.stored: Mapping[str, Stored] = {}  # matrices of codes, which `stored_matrices` finds
        self.kv_scales: Mapping[str, float] = {}  # the format has none
        self._tensors, self._architecture = layout.tensors, architecture
        self._heads = {"attn_q": num_heads, "attn_k": num_kv_heads}
        self._maps: dict[Any, Array] = {}
        self._last: tuple[str, HostTensor] | None = None  # successive weights are cut out of one tensor

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def info(self, name: str) -> GgufTensor:
        """Return the type, the shape and the position of a tensor."""
        return self._tensors[name]

    def dtype(self, name: str) -> str:
        """Return the type in which `read` returns a tensor."""
        tensor = self._tensors[name]
        is_kept = tensor.type.is_float and self._architecture.change(name) in (None, "pairs")
        return FLOATS[tensor.type.name][0] if is_kept else "float32"

    def num_bytes(self) -> int:
        """Return the bytes of all tensors as `read` returns them."""
        return sum(self._read_bytes(t) for t in self._tensors.values())

    def mapped_bytes(self) -> int:
        """Return the bytes of the tensors that are views of the files: floats that need no change."""
        return sum(t.stop - t.start for t in self._tensors.values() if self._is_view(t))

    def read(self, name: str) -> HostTensor:
        """Return a tensor: a view of the mapped file, or a copy if it is quantized or must be changed.

        Raises CheckpointError for a scale or a minimum that is infinite or NaN.
        """
        tensor = self._tensors[name]
        if self._is_view(tensor):
            dtype, numpy_type = FLOATS[tensor.type.name]
            return HostTensor(self._bytes(tensor).view(numpy_type), dtype)
        if self._last is None or self._last[0] != name:
            self._last = None  # free its memory first
            self._last = name, self._copied(tensor)
        return self._last[1]

    def change(self, name: str) -> str | None:
        """Return what llama.cpp's conversion changed in a tensor; None for nothing."""
        return self._architecture.change(name)

    def codes(self, name: str, index: int | None = None) -> Codes:
        """Return the codes, scales and minima of a quantized matrix, in the row order of our weights.

        index: position of one matrix in a stack. The result needs about one byte for each weight. Raises
        CheckpointError as `read` does.
        """
        tensor = self._tensors[name]
        rows = self._rows(tensor)
        try:
            return unpack(tensor.type, rows if index is None else rows[index])
        except ValueError as e:
            raise CheckpointError(f"{name} in {tensor.file.name} {e}; the file is damaged: download it again") from None

    def release(self, name: str) -> None:
        """Release the memory that reading a tensor used. Views stay valid."""
        tensor = self._tensors[name]
        if tensor.file in self._maps:
            release(self._maps[tensor.file][tensor.start : tensor.stop])

    def _is_view(self, tensor: GgufTensor) -> bool:
        return tensor.type.is_float and self._architecture.change(tensor.name) is None

    def _read_bytes(self, tensor: GgufTensor) -> int:
        weights = int(np.prod(tensor.shape, dtype=np.int64))
        return tensor.stop - tensor.start if tensor.type.is_float else 4 * weights

    def _bytes(self, tensor: GgufTensor) -> Array:
        """Return a tensor's bytes as uint8 [..., bytes of a row]."""
        if tensor.file not in self._maps:
            # The map is copy-on-write: nothing writes to it, but torch warns about memory that is marked read-only.
            self._maps[tensor.file] = np.memmap(tensor.file, np.uint8, mode="c")
        data = self._maps[tensor.file][tensor.start : tensor.stop]
        # A view as numbers is aligned, because offsets are multiples of at least 8.
        return data.reshape(*tensor.shape[:-1], tensor.type.row_bytes(tensor.shape[-1]))

    def _rows(self, tensor: GgufTensor) -> Array:
        """Return the bytes of a tensor with its rows in our order."""
        data = self._bytes(tensor)
        if self._architecture.change(tensor.name) != "pairs":
            return data
        heads = self._heads[tensor.name.split(".")[2]]
        rows = data.reshape(-1, tensor.type.size) if data.ndim == 1 else data
        if len(rows) % (2 * heads):
            raise CheckpointError(
                f"{tensor.name} in {tensor.file.name} has {len(rows)} rows, which {heads} heads cannot share in pairs"
            )
        return unpaired(rows, heads).reshape(data.shape)

    def _copied(self, tensor: GgufTensor) -> HostTensor:
        change, rows = self._architecture.change(tensor.name), self._rows(tensor)
        if change == "pairs" and tensor.type.is_float:
            dtype, numpy_type = FLOATS[tensor.type.name]
            return HostTensor(rows.view(numpy_type), dtype)
        try:
            values = dequantize(tensor.type, rows)
        except ValueError as e:
            raise CheckpointError(
                f"{tensor.name} in {tensor.file.name} {e}; the file is damaged: download it again"
            ) from None
        if change == "norm":
            values -= np.float32(self._architecture.norm_offset)
        elif change == "decay":
            if not (values < 0).all():
                raise CheckpointError(f"{tensor.name} in {tensor.file.name} has a decay that is not negative")
            values = np.log(-values)
        elif change == "conv":
            values = values[:, None]
        return HostTensor(values, "float32")


def unpaired(rows: Array, heads: int) -> Array:
    """Return the rows of a q or k matrix, which are neighboring pairs in each head, as two halves of each head."""
    return rows.reshape(heads, -1, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def paired(rows: Array, heads: int) -> Array:
    """Return the rows that `unpaired` turns into these rows."""
    return rows.reshape(heads, 2, -1, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)
