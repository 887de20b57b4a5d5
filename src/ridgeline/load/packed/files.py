"""A checkpoint's tensors with the parts of quantized matrices joined, under the names of the unpacked checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType

from ridgeline.errors import CheckpointError
from ridgeline.load.packed.parts import Found
from ridgeline.load.safetensors import HostTensor, TensorFiles
from ridgeline.load.stored import Stored

_CODES = ("I8", "U8", "F8_E4M3", "I32")  # types of numbers that mean nothing without scales


class PackedFiles:
    """Tensors of floats as TensorFiles has them, and matrices of codes by the names of unpacked checkpoints.

    stored: the matrices of codes. kv_scales: the scales of KV caches, by the names of their tensors. Raises
    CheckpointError for a name that occurs twice, and for codes that belong to no matrix.
    """

    def __init__(self, files: TensorFiles, found: Found) -> None:
        self._files = files
        self.stored: Mapping[str, Stored] = MappingProxyType(found.stored)
        self.kv_scales: Mapping[str, float] = MappingProxyType(found.kv_scales)
        parts = {part for stored in found.stored.values() for part in stored.parts} | set(found.kv_scales)
        self._plain = dict.fromkeys(name for name in files if name not in parts)
        for name in self._plain:
            if name in self.stored:
                raise CheckpointError(f"the checkpoint has {name} twice, as codes and as {files.info(name).dtype}")
            if files.info(name).dtype in _CODES and name.endswith(".weight"):
                raise CheckpointError(f"the checkpoint has {name} in {files.info(name).dtype}, but lacks its scales")

    def __contains__(self, name: str) -> bool:
        return name in self.stored or name in self._plain

    def __iter__(self) -> Iterator[str]:
        yield from self._plain
        yield from self.stored

    def dtype(self, name: str) -> str:
        """Return the type in which `read` returns a tensor of floats."""
        return self._files.dtype(name)

    def num_bytes(self) -> int:
        """Return the bytes of all tensors as they are read: floats, and the arrays of quantized matrices."""
        return self.mapped_bytes() + sum(stored.num_bytes for stored in self.stored.values())

    def mapped_bytes(self) -> int:
        """Return the bytes of the tensors that are views of the files, which are those of floats."""
        return sum((info := self._files.info(name)).stop - info.start for name in self._plain)

    def read(self, name: str) -> HostTensor:
        """Read a tensor of floats as TensorFiles does."""
        return self._files.read(name)

    def release(self, name: str) -> None:
        """Release the memory that reading a tensor used. Views stay valid."""
        for part in self.stored[name].parts if name in self.stored else (name,):
            self._files.release(part)
