"""MXFP4 (GPT-OSS): stacks of matrices in four-bit floats, in blocks that share an exponent.

A stack W [expert, out, in] is stored as two tensors (OCP Microscaling Formats 1.0). `NAME_blocks` is uint8
[expert, out, in / 32, 16], with two elements per byte, the first one in the low half. `NAME_scales` is uint8 [expert,
out, in / 32], with a power of two for each block of 32, stored as exponent + 127. An element has a sign bit, two bits
of exponent and one of mantissa.
"""

from __future__ import annotations

from ridgeline.archs.quantization import Mxfp4
from ridgeline.errors import CheckpointError
from ridgeline.load.packed import bits as packing
from ridgeline.load.packed.compressed import powers
from ridgeline.load.packed.parts import Found, Parts
from ridgeline.load.safetensors import TensorFiles
from ridgeline.load.stored import Stored
from ridgeline.ops.api import QuantizedMatrix
from ridgeline.spec.quant import Format

BLOCKS, SCALES = "_blocks", "_scales"
BLOCK = 32  # elements that share a scale
FORMAT = Format("fp4", BLOCK)


def read(scheme: Mxfp4, files: TensorFiles) -> Found:
    """Return the stacks. Raises CheckpointError for blocks without scales or scales without blocks, and for types and
    shapes that the format does not allow.
    """
    parts, found = Parts(files), Found()
    for name in sorted({*parts.modules(BLOCKS), *parts.modules(SCALES)}):
        found.stored[name] = _stored(parts, name)
    return found


def _stored(parts: Parts, name: str) -> Stored:
    if parts.has(name):
        raise CheckpointError(f"the checkpoint has {name} twice, packed and unpacked")
    for part, other in ((BLOCKS, SCALES), (SCALES, BLOCKS)):
        if not parts.has(name + part):
            raise CheckpointError(f"the checkpoint has {name}{other} without {name}{part}")
    blocks, scales = parts.info(name + BLOCKS), parts.info(name + SCALES)
    fits = blocks.shape[:-1] == scales.shape and len(scales.shape) == 3 and blocks.shape[-1] == BLOCK // 2
    if not fits or 0 in scales.shape or (blocks.dtype, scales.dtype) != ("U8", "U8"):
        raise CheckpointError(
            f"{name}{BLOCKS} is {blocks.dtype} {list(blocks.shape)} and {name}{SCALES} {scales.dtype} "
            f"{list(scales.shape)}; MXFP4 needs U8 [experts, out, n, {BLOCK // 2}] and U8 [experts, out, n]"
        )
    experts, rows, groups = scales.shape

    def read_one(index: int) -> QuantizedMatrix:
        data, exponents = (parts.raw(name + part)[index] for part in (BLOCKS, SCALES))
        codes = packing.unpack(data.reshape(rows, -1), 4, groups * BLOCK)
        return QuantizedMatrix(FORMAT, codes, powers(name + SCALES, exponents))

    return Stored(FORMAT, (experts, rows, groups * BLOCK), (name + BLOCKS, name + SCALES), read_one)
