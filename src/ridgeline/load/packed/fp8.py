"""Matrices in fp8 with a scale for each block (DeepSeek-V3), the matrix or each row (AutoFP8, FBGEMM, ModelOpt).

`weight` is fp8 [out, in]. `weight_scale_inv` has a factor for each block; despite the name it is multiplied, not
divided. `weight_scale` has one number, or one for each row. ModelOpt's NVFP4 has two fp4 codes in a byte of `weight`,
fp8 scales `weight_scale` for groups of 16, and their factor `weight_scale_2`.
"""

from __future__ import annotations

import numpy as np

from ridgeline.archs.quantization import Fp8, Fp8Blocks, ModelOptNvfp4
from ridgeline.errors import CheckpointError
from ridgeline.load.packed import bits as packing
from ridgeline.load.packed.parts import E4M3, FLOATS, Found, Parts, check_fp8, check_scales, lazily, spread
from ridgeline.load.safetensors import TensorFiles
from ridgeline.load.stored import Stored
from ridgeline.ops.api import QuantizedMatrix
from ridgeline.spec.quant import NUMBERS, Format

SCALE_OF_BLOCKS = "_scale_inv"
NVFP4_GROUP = 16


def read_blocks(scheme: Fp8Blocks, files: TensorFiles) -> Found:
    """Return the matrices, and scales of KV caches. Raises CheckpointError for fp8 without scales, and for scales of
    another shape.
    """
    parts, (high, wide) = Parts(files), scheme.blocks
    found, format = Found(kv_scales=parts.kv_scales()), Format("fp8", wide, high)
    missing = []
    for name in (name for name in files if files.info(name).dtype == E4M3):
        shape = parts.matrix(name, E4M3)
        wanted = -(-shape[0] // high), -(-shape[1] // wide)
        if not parts.has(name + SCALE_OF_BLOCKS):
            missing.append(name + SCALE_OF_BLOCKS)
            continue
        info = parts.info(name + SCALE_OF_BLOCKS)
        if info.shape != wanted or info.dtype not in FLOATS:
            raise CheckpointError(
                f"{name} has shape {list(shape)}, so its scales must be {' or '.join(FLOATS)} {list(wanted)}, "
                f"but {name}{SCALE_OF_BLOCKS} is {info.dtype} {list(info.shape)}; check weight_block_size"
            )
        names = name, name + SCALE_OF_BLOCKS
        found.stored[name] = Stored(format, shape, names, lazily(_read_blocks, parts, name, format))
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise CheckpointError(f"the checkpoint lacks {min(missing)}{more}, the scales of matrices in fp8")
    return found


def _read_blocks(parts: Parts, name: str, format: Format) -> QuantizedMatrix:
    codes = check_fp8(name, parts.raw(name))
    scales = spread(parts.scales(name + SCALE_OF_BLOCKS), codes.shape[0], format.rows)
    return QuantizedMatrix(format, codes, scales)


def read(scheme: Fp8, files: TensorFiles) -> Found:
    """Return the matrices, and scales of KV caches. Raises CheckpointError for parts that do not fit each other."""
    parts = Parts(files)
    found = Found(kv_scales=parts.kv_scales())
    for module in parts.modules(".weight_scale"):
        name = f"{module}.weight"
        shape = parts.matrix(name, E4M3)
        by_row = (shape[0],), (shape[0], 1)
        scale = parts.expect(f"{name}_scale", FLOATS, (), (1,), *by_row)
        rows = 1 if scale in by_row and shape[0] > 1 else 0
        names = [name, f"{name}_scale"]
        if scheme.static_input:
            parts.expect(f"{module}.input_scale", FLOATS, (), (1,))
            names.append(f"{module}.input_scale")
        if scheme.bound:
            parts.expect(f"{module}.input_scale_ub", FLOATS, (), (1,))
            names.append(f"{module}.input_scale_ub")
        format = Format("fp8", 0, rows, "none", scheme.activations)
        read_one = lazily(_read, parts, module, format, scheme.static_input, scheme.bound)
        found.stored[name] = Stored(format, shape, tuple(names), read_one)
    return found


def _read(parts: Parts, module: str, format: Format, static_input: bool, has_bound: bool) -> QuantizedMatrix:
    codes = check_fp8(f"{module}.weight", parts.raw(f"{module}.weight"))
    scales = spread(parts.scales(f"{module}.weight_scale").reshape(-1, 1), codes.shape[0], format.rows)
    given = parts.scalar(f"{module}.input_scale") if static_input else None
    if has_bound:
        parts.scalar(f"{module}.input_scale_ub")  # it is not applied, but a damaged one says that the file is damaged
    return QuantizedMatrix(format, codes, scales, input_scale=given)


def read_nvfp4(scheme: ModelOptNvfp4, files: TensorFiles) -> Found:
    """Return the matrices, and scales of KV caches. Raises CheckpointError for parts that do not fit each other."""
    parts, format = Parts(files), Format("fp4", NVFP4_GROUP)
    found = Found(kv_scales=parts.kv_scales())
    for module in parts.modules(".weight_scale_2"):
        name = f"{module}.weight"
        rows, half = parts.matrix(name, "U8")
        parts.expect(f"{name}_scale", (E4M3,), (rows, format.num_groups(2 * half)))
        parts.scalar(f"{name}_scale_2")
        names = [name, f"{name}_scale", f"{name}_scale_2"]
        if parts.has(f"{module}.input_scale"):
            parts.expect(f"{module}.input_scale", FLOATS, (), (1,))
            names.append(f"{module}.input_scale")
        found.stored[name] = Stored(format, (rows, 2 * half), tuple(names), lazily(_read_nvfp4, parts, name, format))
    return found


def _read_nvfp4(parts: Parts, name: str, format: Format) -> QuantizedMatrix:
    data = parts.raw(name)
    codes = packing.unpack(data, 4, 2 * data.shape[1])
    stored = np.array(NUMBERS["fp8"].levels, np.float32)[parts.raw(f"{name}_scale")]
    scales = check_scales(f"{name}_scale", stored * np.float32(parts.scalar(f"{name}_scale_2")))
    if parts.has(given := f"{name.removesuffix('weight')}input_scale"):
        parts.scalar(given)  # it is not applied, but a damaged one says that the file is damaged
    return QuantizedMatrix(format, codes, scales)
