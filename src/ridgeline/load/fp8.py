"""Read matrices of 8-bit floats with a scale per block (DeepSeek-V3's checkpoints), and dequantize them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from ridgeline.errors import CheckpointError
from ridgeline.load.safetensors import HostTensor, TensorFiles

E4M3 = "F8_E4M3"  # safetensors' name for the type
SCALE = "_scale_inv"  # suffix of the factors for a matrix's blocks; despite the name they are multiplied, not divided


class BlockScaledFiles:
    """TensorFiles that return every fp8 matrix as float32: each number times its block's scale, rounded once.

    blocks: rows and columns of a block; blocks at the far edges may be smaller. Raises CheckpointError for a matrix
    without scales.
    """

    def __init__(self, files: TensorFiles, blocks: tuple[int, int]) -> None:
        self._files, self._blocks = files, blocks
        self._scaled = {name for name in files if files.info(name).dtype == E4M3}
        self._scales = {name + SCALE for name in self._scaled}
        if missing := sorted(name for name in self._scales if name not in files):
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise CheckpointError(f"the checkpoint lacks {missing[0]}{more}, the scales of matrices in fp8")

    def __contains__(self, name: str) -> bool:
        return name in self._files and name not in self._scales

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._files if name not in self._scales)

    def num_bytes(self) -> int:
        """Return the bytes of all tensors as `read` returns them."""
        sizes = {name: self._files.info(name) for name in self}
        return sum((t.stop - t.start) * (4 if name in self._scaled else 1) for name, t in sizes.items())

    def mapped_bytes(self) -> int:
        """Return the bytes of the tensors that are views of the files, which are those not in fp8."""
        plain = (self._files.info(name) for name in self if name not in self._scaled)
        return sum(t.stop - t.start for t in plain)

    def release(self, name: str) -> None:
        """Release a tensor's memory, as TensorFiles does."""
        self._files.release(name)

    def read(self, name: str) -> HostTensor:
        """Read a tensor as TensorFiles does, dequantized."""
        if name not in self._scaled:
            return self._files.read(name)
        codes, scale = self._files.codes(name), self._files.read(name + SCALE)
        rows, columns = self._blocks
        wanted = tuple(-(-n // size) for n, size in zip(codes.shape, self._blocks, strict=False))
        if codes.ndim != 2 or scale.data.shape != wanted or scale.dtype != "float32":
            raise CheckpointError(
                f"{name} has shape {list(codes.shape)}, so its scales must be float32 {list(wanted)}, "
                f"but {name + SCALE} is {scale.dtype} {list(scale.data.shape)}"
            )
        out: np.ndarray[Any, Any] = VALUES[codes]
        for i, block_scales in enumerate(scale.data):
            out[i * rows : (i + 1) * rows] *= np.repeat(block_scales, columns)[: codes.shape[1]]
        return HostTensor(out, "float32")


def _e4m3_values() -> np.ndarray[Any, np.dtype[np.float32]]:
    """Return the number for each byte: sign, 4 bits of exponent, 3 of mantissa, no infinity (arXiv:2209.05433)."""
    codes = np.arange(256)
    exponent, mantissa = codes >> 3 & 15, codes & 7
    magnitude = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10.0))
    values = np.where(codes >> 7 == 1, -magnitude, magnitude)
    return np.where(codes & 127 == 127, np.nan, values).astype(np.float32)


VALUES = _e4m3_values()
