"""Read safetensors files through a memory map: a tensor is a view of the file until it is copied.

The safetensors library checks a file's header (lengths, offsets, overlaps). The data is mapped here, because the
library can neither give bfloat16 to numpy nor map without a copy.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from ridgeline.errors import CheckpointError
from ridgeline.load.stored import Stored
from ridgeline.ops.mapped import release
from ridgeline.spec.folders import check_regular, read_text

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MAX_INDEX_BYTES = 64 << 20

# safetensors' name for a type -> ours, and the numpy type with the same bits
_DTYPES: Mapping[str, tuple[str, Any]] = {
    "F32": ("float32", np.float32),
    "F16": ("float16", np.float16),
    "BF16": ("bfloat16", np.uint16),
}

MAX_AXES = 8  # weights have up to 4, numpy at most 64
# Numpy types with the same bits, for the parts of quantized matrices.
_BITS: Mapping[str, Any] = {
    "F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": np.uint16, "F8_E4M3": np.uint8,
    "F8_E8M0": np.uint8, "I64": np.int64, "I32": np.int32, "I16": np.int16, "I8": np.int8, "U8": np.uint8,
    "BOOL": np.uint8,
}  # fmt: skip


# Our names of types -> safetensors' names. fp8 is stored as uint8 bits.
_CODES: Mapping[str, str] = {
    **{ours: code for code, (ours, _) in _DTYPES.items()},
    "int64": "I64", "int32": "I32", "int8": "I8", "uint8": "U8", "fp8": "F8_E4M3", "bool": "BOOL",
}  # fmt: skip


def dtype_code(dtype: str) -> str:
    """Return safetensors' name for one of our types."""
    return _CODES[dtype]


def type_of_code(code: str) -> str:
    """Return our name of a type of safetensors. Raises CheckpointError for a type that we do not write."""
    for ours, name in _CODES.items():
        if name == code:
            return ours
    raise CheckpointError(f"tensors of type {code} cannot be written; known are {', '.join(_CODES.values())}")


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor is stored. `dtype` is safetensors' name for its type; `start` and `stop` are bytes from the file's
    start.
    """

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class HostTensor:
    """A tensor in host memory; bfloat16 is stored as uint16 bits."""

    data: np.ndarray[Any, Any]
    dtype: str


class TensorFiles:
    """All tensors of a checkpoint's folder, by name.

    stored, kv_scales: matrices that are stored as codes, and scales of a KV cache; there are none here. metadata: the
    texts in the headers of the files. single: name of the file if there is only one. Raises CheckpointError if there
    are no safetensors files, if one is missing, truncated or malformed, or if a name occurs in two files.
    """

    stored: Mapping[str, Stored] = MappingProxyType({})
    kv_scales: Mapping[str, float] = MappingProxyType({})

    def __init__(self, folder: Path, single: str = SINGLE) -> None:
        self.files = _find_files(folder, single)
        self._tensors: dict[str, TensorInfo] = {}
        self._maps: dict[Path, np.ndarray[Any, Any]] = {}
        self.metadata: dict[str, str] = {}
        for file in self.files:
            first, header = _read_header(file)
            self.metadata |= header.pop("__metadata__", {})
            for name, info in _tensors(file, first, header):
                if name in self._tensors:
                    raise CheckpointError(f"{name} is in both {self._tensors[name].file.name} and {file.name}")
                self._tensors[name] = info

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def info(self, name: str) -> TensorInfo:
        return self._tensors[name]

    def dtype(self, name: str) -> str:
        """Return the type in which `read` returns a tensor; an empty text for a type that it does not read."""
        return _DTYPES.get(self._tensors[name].dtype, ("", ""))[0]

    def num_bytes(self) -> int:
        """Return the bytes of all tensors as `read` returns them."""
        return sum(t.stop - t.start for t in self._tensors.values())

    def mapped_bytes(self) -> int:
        """Return the bytes of the tensors that are views of the files."""
        return self.num_bytes()

    def read(self, name: str) -> HostTensor:
        """Return a view of the mapped file. Raises CheckpointError for a type other than a float of 2 or 4 bytes."""
        info = self._tensors[name]
        if info.dtype not in _DTYPES:
            known = ", ".join(_DTYPES)
            raise CheckpointError(f"{name} in {info.file.name} has type {info.dtype}; supported: {known}")
        dtype, numpy_type = _DTYPES[info.dtype]
        return HostTensor(self._view(info, numpy_type), dtype)

    def array(self, name: str) -> np.ndarray[Any, Any]:
        """Return a tensor as a view of the mapped file, in numpy's type with the same bits. Raises CheckpointError for
        a type that no format uses.
        """
        info = self._tensors[name]
        if info.dtype not in _BITS:
            raise CheckpointError(f"{name} in {info.file.name} has type {info.dtype}; supported: {', '.join(_BITS)}")
        return self._view(info, _BITS[info.dtype])

    def release(self, name: str) -> None:
        """Release the memory that reading a tensor used. Views stay valid."""
        info = self._tensors[name]
        if info.file in self._maps:
            release(self._maps[info.file][info.start : info.stop])

    def _view(self, info: TensorInfo, numpy_type: Any) -> np.ndarray[Any, Any]:
        if info.file not in self._maps:
            # The map is copy-on-write: nothing writes to it, but torch warns about memory that is marked read-only.
            self._maps[info.file] = np.memmap(info.file, np.uint8, mode="c")
        data = self._maps[info.file][info.start : info.stop]
        if info.start % np.dtype(numpy_type).itemsize:
            data = data.copy()  # the file's header is not padded, but kernels need aligned elements
        view: np.ndarray[Any, Any] = data.view(numpy_type).reshape(info.shape)
        return view


def _find_files(folder: Path, single: str) -> list[Path]:
    index = folder / INDEX
    if index.exists():
        files = sorted({folder / name for name in _read_index(index).values()})
        if absent := [f.name for f in files if not f.exists()]:
            raise CheckpointError(f"{folder}: {INDEX} names files that are missing: {', '.join(absent)}")
        return files
    if (folder / single).exists():
        return [folder / single]
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt")) or any(folder.glob("*.pth")):
        raise CheckpointError(
            f"{folder}: the weights are pickled (.bin, .pt); such files can run code when they are read, so they are "
            "refused: convert them to safetensors"
        )
    raise CheckpointError(
        f"{folder}: no {SINGLE} and no {INDEX}: the weights are missing or were never downloaded; "
        "--load-format dummy uses random weights"
    )


def _read_index(index: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(read_text(index, MAX_INDEX_BYTES))["weight_map"]
        names = {str(k): str(v) for k, v in weight_map.items()}
    except (ValueError, KeyError, TypeError, AttributeError, OSError, RecursionError) as e:
        raise CheckpointError(f"{index.name} is unreadable: {type(e).__name__}: {e}") from None
    if bad := next((v for v in names.values() if Path(v).name != v or v in (".", "..")), None):
        raise CheckpointError(f"{index.name} names a file outside of its folder: {bad!r}")
    return names


def _read_header(file: Path) -> tuple[int, dict[str, Any]]:
    """Return the position of the first tensor, and the parsed header. Raises CheckpointError."""
    try:
        check_regular(file)
        with safe_open(file, framework="numpy"):
            pass  # opening the file checks its header against its length
        with file.open("rb") as f:
            length = int.from_bytes(f.read(8), "little")
            header = json.loads(f.read(length))
    except (SafetensorError, OSError, ValueError, RecursionError) as e:
        raise CheckpointError(f"{file.name} is not a readable safetensors file (truncated?): {e}") from None
    return 8 + length, header


def _tensors(file: Path, first: int, header: Mapping[str, Any]) -> Iterator[tuple[str, TensorInfo]]:
    for name, entry in header.items():
        if (axes := len(entry["shape"])) > MAX_AXES:
            raise CheckpointError(f"{name:.100} in {file.name} has {axes} axes; a weight has at most {MAX_AXES}")
        start, stop = (first + offset for offset in entry["data_offsets"])
        yield name, TensorInfo(file, entry["dtype"], tuple(entry["shape"]), start, stop)
