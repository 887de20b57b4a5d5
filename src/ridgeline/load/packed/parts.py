"""The tensors of quantized modules: headers are checked before anything is read, values while they are read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ridgeline.errors import CheckpointError
from ridgeline.load.kv_scales import SUFFIXES
from ridgeline.load.safetensors import TensorFiles, TensorInfo
from ridgeline.load.stored import Ndarray, Stored

FLOATS = ("F32", "F16", "BF16")
E4M3 = "F8_E4M3"  # safetensors' name for the type


@dataclass(slots=True)
class Found:
    """The matrices of a checkpoint that are stored as codes, and scales of its KV cache.

    stored: matrices by the name of the tensor in the unpacked checkpoint. kv_scales: the number of each tensor.
    """

    stored: dict[str, Stored] = field(default_factory=dict)
    kv_scales: dict[str, float] = field(default_factory=dict)


class Parts:
    """Access to the tensors of a checkpoint, by the name of a module and the last part of a tensor's name."""

    def __init__(self, files: TensorFiles) -> None:
        self._files = files

    def modules(self, suffix: str) -> Iterator[str]:
        """Yield the modules that have a tensor with a last part, which begins with a dot."""
        return (name.removesuffix(suffix) for name in self._files if name.endswith(suffix) and name != suffix)

    def has(self, name: str) -> bool:
        return name in self._files

    def info(self, name: str) -> TensorInfo:
        """Return a header. Raises CheckpointError for a missing tensor."""
        if name not in self._files:
            raise CheckpointError(f"the checkpoint lacks {name}; download it again")
        return self._files.info(name)

    def expect(self, name: str, dtypes: tuple[str, ...], *shapes: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of a tensor. Raises CheckpointError unless it has one of the types, and one of the shapes
        where they are given.
        """
        info = self.info(name)
        if info.dtype not in dtypes or (shapes and info.shape not in shapes):
            sizes = " or ".join(str(list(shape)) for shape in shapes)
            raise CheckpointError(
                f"{name} is {info.dtype} {list(info.shape)}; it must be {' or '.join(dtypes)}"
                + (f" {sizes}" if sizes else "")
            )
        return info.shape

    def matrix(self, name: str, *dtypes: str) -> tuple[int, int]:
        """Return the shape of a tensor with two axes. Raises CheckpointError for others, and for empty ones."""
        shape = self.expect(name, dtypes)
        if len(shape) != 2 or 0 in shape:
            raise CheckpointError(f"{name} has shape {list(shape)}; it must have two axes, neither of them empty")
        return shape[0], shape[1]

    def vector(self, name: str, *dtypes: str) -> int:
        """Return the length of a tensor with one axis. Raises CheckpointError for others."""
        shape = self.expect(name, dtypes)
        if len(shape) != 1:
            raise CheckpointError(f"{name} has shape {list(shape)}; it must have one axis")
        return shape[0]

    def raw(self, name: str) -> Ndarray:
        """Return a tensor as a view of its file, in numpy's type with the same bits."""
        return self._files.array(name)

    def floats(self, name: str) -> Ndarray:
        """Return a tensor in float32, which holds all numbers of its type."""
        data = self._files.array(name)
        if self._files.info(name).dtype == "BF16":
            return (data.astype(np.uint32) << 16).view(np.float32)
        return data.astype(np.float32, copy=False)

    def scales(self, name: str, *, zero: bool = False) -> Ndarray:
        """Return a tensor of scales in float32. Raises CheckpointError for one that is no positive number.

        zero: whether 0 is allowed.
        """
        return check_scales(name, self.floats(name), zero=zero)

    def scalar(self, name: str) -> float:
        """Return a positive number that is stored alone. Raises CheckpointError."""
        self.expect(name, FLOATS, (), (1,))
        return float(self.scales(name).reshape(-1)[0])

    def kv_scales(self) -> dict[str, float]:
        """Return the scales of KV caches by the names of their tensors. Raises CheckpointError for invalid ones."""
        names = [name for name in self._files if name.endswith(tuple(SUFFIXES))]
        return {name: self.scalar(name) for name in names}


def check_scales(name: str, scales: Ndarray, *, zero: bool = False) -> Ndarray:
    """Return scales, float32. Raises CheckpointError, which names the first one that is no positive number."""
    good = np.isfinite(scales) & ((scales >= 0) if zero else (scales > 0))
    if good.all():
        return scales
    at = tuple(int(i) for i in np.argwhere(~good)[0])
    raise CheckpointError(
        f"{name} has the scale {float(scales[at]):g} at {list(at)}; every scale must be a finite number above 0, so "
        "the file is damaged or was badly quantized"
    )


def check_fp8(name: str, codes: Ndarray) -> Ndarray:
    """Return codes of e4m3, uint8. Raises CheckpointError for one that is not a number."""
    if codes.size and ((codes & 127) == 127).any():
        raise CheckpointError(f"{name} contains NaN; the file is damaged or was badly quantized")
    return codes


def spread(scales: Ndarray, rows: int, shared: int) -> Ndarray:
    """Return the scales of each row, [rows, groups]. scales: [blocks, groups]; shared: rows of a block, 0 for all."""
    if shared == 1:
        return scales
    out: Ndarray = np.repeat(scales, shared or rows, axis=0)[:rows]
    return out


def signed(codes: Ndarray, bits: int) -> Ndarray:
    """Return numbers from 0 to 2^bits - 1 as int8, less half of the range. The array is changed in place."""
    data = codes if codes.flags.writeable and codes.flags.owndata else codes.copy()
    data -= np.uint8(1 << (bits - 1))  # wraps, as the bits of int8 do
    out: Ndarray = data.view(np.int8)
    return out


def lazily(function: Callable[..., Any], *arguments: Any) -> Callable[[int], Any]:
    """Return a function of an index, which calls `function(*arguments)`."""
    return lambda index: function(*arguments)


def is_half(scales: Any) -> bool:
    """Return whether float16 holds all scales exactly."""
    with np.errstate(over="ignore"):
        return bool(np.array_equal(scales.astype(np.float16).astype(np.float32), scales))
