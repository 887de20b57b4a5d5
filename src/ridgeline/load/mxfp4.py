"""Read MXFP4 checkpoints (GPT-OSS), matrices of four-bit floats in blocks with one exponent, and unpack them.

A stack of matrices W [expert, out, in] is stored as two tensors (OCP Microscaling Formats 1.0). `NAME_blocks` is uint8
[expert, out, in / 32, 16], with two elements per byte, the first one in the low half. `NAME_scales` is uint8 [expert,
out, in / 32], with a power of two for each block of 32, stored as exponent + 127. An element has a sign bit, two bits
of exponent and one of mantissa. For scales up to 2**125 every product is a bfloat16 number.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ridgeline.errors import CheckpointError
from ridgeline.load.safetensors import HostTensor, TensorFiles

BLOCKS, SCALES = "_blocks", "_scales"
BLOCK = 32  # elements that share a scale
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
LARGEST_SCALE = 252  # stands for 2**125; 6 * 2**126 would be infinite, and 255 is NaN

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


def unpack(blocks: Bytes, scales: Bytes) -> np.ndarray[Any, np.dtype[np.uint16]]:
    """Return blocks [..., n, 16] with scales [..., n] as bfloat16 bits [..., 32 n]. Raises ValueError for a scale above
    2**125.
    """
    if scales.size and int(scales.max()) > LARGEST_SCALE:
        raise ValueError(f"has a scale of {int(scales.max())}; above {LARGEST_SCALE} elements do not fit into bfloat16")
    out = np.empty((*blocks.shape[:-2], BLOCK * blocks.shape[-2]), np.uint16)
    table = _table()
    for index in np.ndindex(blocks.shape[:-3]):  # one matrix at a time, because indices need more memory than its bytes
        pairs = table.take(scales[index].astype(np.uint16)[..., None] << 8 | blocks[index])  # [out, n, 16]
        out[index] = pairs.view(np.uint16).reshape(out[index].shape)
    return out


def _table() -> np.ndarray[Any, np.dtype[np.uint32]]:
    """Return a table from 256 * scale + byte to the bfloat16 bits of the byte's two elements, as one number."""
    elements = np.array([*MAGNITUDES, *(-m for m in MAGNITUDES)], np.float32)
    byte = np.arange(256)
    pairs = elements[np.stack([byte & 15, byte >> 4], 1)]
    exponents = np.minimum(byte, LARGEST_SCALE) - 127
    # This is exact in float32, which has bfloat16's exponents: the upper half is the bfloat16 number.
    scaled: np.ndarray[Any, np.dtype[np.float32]] = np.ldexp(pairs[None], exponents[:, None, None])
    return (scaled.view(np.uint32) >> 16).astype(np.uint16).view(np.uint32).ravel()


class Mxfp4Files(TensorFiles):
    """A checkpoint's tensors, with each packed one under the name and in the form of the unpacked checkpoint.

    The unpacked form is [expert, in, out] in bfloat16. Raises CheckpointError for blocks without scales or scales
    without blocks, and for types and shapes that the format does not allow.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        names = list(super().__iter__())
        self._packed = {name.removesuffix(BLOCKS) for name in names if name.endswith(BLOCKS)}
        for name in sorted(self._packed | {name.removesuffix(SCALES) for name in names if name.endswith(SCALES)}):
            self._check(name)
        self._last: tuple[str, HostTensor] | None = None  # successive weights are cut out of one tensor

    def __contains__(self, name: str) -> bool:
        return name in self._packed or (super().__contains__(name) and not name.endswith((BLOCKS, SCALES)))

    def __iter__(self) -> Iterator[str]:
        yield from (name for name in super().__iter__() if not name.endswith((BLOCKS, SCALES)))
        yield from self._packed

    def num_bytes(self) -> int:
        return self.mapped_bytes() + sum(4 * self._bytes_of(name + BLOCKS) for name in self._packed)

    def mapped_bytes(self) -> int:
        packed = sum(self._bytes_of(name + part) for name in self._packed for part in (BLOCKS, SCALES))
        return super().num_bytes() - packed

    def read(self, name: str) -> HostTensor:
        if name not in self._packed:
            return super().read(name)
        if self._last is None or self._last[0] != name:
            blocks, scales = self.codes(name + BLOCKS), self.codes(name + SCALES)
            self._last = None  # free its memory first
            try:
                self._last = name, HostTensor(unpack(blocks, scales).swapaxes(-1, -2), "bfloat16")
            except ValueError as e:
                raise CheckpointError(f"{name}{SCALES} {e}") from None
        return self._last[1]

    def release(self, name: str) -> None:
        super().release(name + BLOCKS if name in self._packed else name)

    def _bytes_of(self, name: str) -> int:
        info = self.info(name)
        return info.stop - info.start

    def _check(self, name: str) -> None:
        if super().__contains__(name):
            raise CheckpointError(f"the checkpoint has {name} twice, packed and unpacked")
        for part, other in ((BLOCKS, SCALES), (SCALES, BLOCKS)):
            if not super().__contains__(name + part):
                raise CheckpointError(f"the checkpoint has {name}{other} without {name}{part}")
        blocks, scales = self.info(name + BLOCKS), self.info(name + SCALES)
        fits = blocks.shape[:-1] == scales.shape and len(scales.shape) == 3 and blocks.shape[-1] == BLOCK // 2
        if not fits or (blocks.dtype, scales.dtype) != ("U8", "U8"):
            raise CheckpointError(
                f"{name}{BLOCKS} is {blocks.dtype} {list(blocks.shape)} and {name}{SCALES} {scales.dtype} "
                f"{list(scales.shape)}; MXFP4 needs U8 [experts, out, n, {BLOCK // 2}] and U8 [experts, out, n]"
            )
