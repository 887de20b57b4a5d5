"""torchao: whole numbers in bytes (Int8Tensor, IntxUnpackedToInt8Tensor) and fp8 (Float8Tensor), in safetensors.

For a matrix `M.weight` [out, in] the checkpoint has `M._weight_qdata`, int8 or fp8 [out, in], `M._weight_scale`
[out, groups], and for whole numbers `M._weight_zero_point`. The metadata of a file's header has a JSON text for each
tensor: its class, and attributes of it, such as the block of numbers that share a scale.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from ridgeline.archs.quantization import INTEGERS, TorchAo
from ridgeline.errors import CheckpointError
from ridgeline.load.packed.compressed import check_range
from ridgeline.load.packed.parts import E4M3, FLOATS, Found, Parts, check_fp8, lazily, spread
from ridgeline.load.safetensors import TensorFiles
from ridgeline.load.stored import Stored
from ridgeline.ops.api import QuantizedMatrix
from ridgeline.spec.quant import LARGEST_GROUP, Activations, Format

PLAIN, INT8, INTX, FLOAT8 = "Tensor", "Int8Tensor", "IntxUnpackedToInt8Tensor", "Float8Tensor"
_SUFFIX, PART = ".weight", "._weight_"
_MAX_TEXT = 1 << 16


def read(scheme: TorchAo, files: TensorFiles) -> Found:
    """Return the matrices. Raises CheckpointError for other classes, and for parts that do not fit each other."""
    parts, found = Parts(files), Found()
    for name, text in files.metadata.items():
        if "." not in name:
            continue
        kind, data = _description(name, text)
        if kind == PLAIN:
            continue
        if kind not in (INT8, INTX, FLOAT8) or not name.endswith(_SUFFIX):
            raise CheckpointError(
                f"{name} is a {kind[:80]} of torchao; read are matrices of the classes {INT8}, {INTX} and {FLOAT8}: "
                "quantize the model with IntxWeightOnlyConfig, Int8WeightOnlyConfig or Float8WeightOnlyConfig"
            )
        found.stored[name] = _stored(parts, name, kind, data)
    used = {part for stored in found.stored.values() for part in stored.parts}
    if unknown := next((name for name in files if PART in name and name not in used), None):
        raise CheckpointError(f"{unknown} is a part of a quantized matrix that is not read; the outputs would be wrong")
    return found


def _description(name: str, text: str) -> tuple[str, Mapping[str, Any]]:
    """Return the class and the attributes of a tensor. Raises CheckpointError for a text that has none."""
    try:
        if len(text) > _MAX_TEXT:
            raise ValueError(f"its text has {len(text)} characters; at most {_MAX_TEXT} are read")
        found = json.loads(text)
        kind, data = found["_type"], found.get("_data", {})
        if not isinstance(kind, str) or not isinstance(data, dict):
            raise ValueError("its class must be a text, and its attributes an object")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
        raise CheckpointError(f"the metadata of {name} is not readable: {type(e).__name__}: {str(e)[:80]}") from None
    return kind, data


def _stored(parts: Parts, name: str, kind: str, data: Mapping[str, Any]) -> Stored:
    module = name.removesuffix(_SUFFIX)
    codes, scale, zero = (f"{module}{PART}{part}" for part in ("qdata", "scale", "zero_point"))
    shape = parts.matrix(codes, E4M3 if kind == FLOAT8 else "I8")
    rows, group = _block(name, data, shape)
    bits = _bits(name, data) if kind == INTX else 8
    groups = Format("int8", group).num_groups(shape[1])
    sizes: tuple[tuple[int, ...], ...] = ((shape[0], groups),) if rows else ((1, 1), (1,), ())
    if rows and not group:
        sizes = (*sizes, (shape[0],))
    parts.expect(scale, FLOATS, *sizes)
    names, offsets = [codes, scale], False
    if kind != FLOAT8 and parts.has(zero):
        parts.expect(zero, ("I8",), *sizes)
        names.append(zero)
        # The zero points of rows are few, so that they are read here. Those of symmetric matrices are all 0.
        offsets = kind == INTX or bool(parts.raw(zero).any())
    activations: Activations = _activations(kind, data)
    numbers = "fp8" if kind == FLOAT8 else INTEGERS[bits]
    format = Format(numbers, group, rows, "zero_points" if offsets else "none", activations)
    return Stored(format, shape, tuple(names), lazily(_read, parts, codes, scale, zero if offsets else "", format))


def _block(name: str, data: Mapping[str, Any], shape: tuple[int, int]) -> tuple[int, int]:
    """Return the rows and columns that share a scale, as Format counts them. Raises CheckpointError."""
    block = data.get("block_size")
    if not isinstance(block, list) or len(block) != 2 or not all(type(n) is int and n > 0 for n in block):
        raise CheckpointError(f"{name} has the block_size {str(block)[:80]}; it must be two positive numbers")
    if block == list(shape) and shape[0] > 1:
        return 0, 0
    if block[0] != 1 or block[1] > LARGEST_GROUP or shape[1] % block[1]:
        raise CheckpointError(
            f"{name} has the block_size {block}; read are one row, a part of a row that divides it, and the matrix"
        )
    return 1, 0 if block[1] == shape[1] else block[1]


def _bits(name: str, data: Mapping[str, Any]) -> int:
    target = data.get("target_dtype")
    text = str(target.get("_data")) if isinstance(target, dict) else str(target)
    bits = {f"int{n}": n for n in INTEGERS}.get(text)
    if bits is None:
        known = ", ".join(f"int{n}" for n in INTEGERS)
        raise CheckpointError(f"{name} has the target_dtype {text[:80]!r}; read are {known}")
    return bits


def _activations(kind: str, data: Mapping[str, Any]) -> Activations:
    """Return how activations are taken: exactly where torchao rounds them in a way that is not computed."""
    rounding = data.get("act_quant_kwargs")
    own = rounding.get("_data") if isinstance(rounding, dict) else None
    if not isinstance(own, dict) or _name(own.get("granularity")) != "PerRow":
        return "exact"
    if kind == FLOAT8:
        return "fp8"
    is_symmetric = kind == INT8 and own.get("mapping_type", {}) in ("SYMMETRIC", _SYMMETRIC)
    return "int8" if is_symmetric and not own.get("reduce_range") else "exact"


_SYMMETRIC = {"_type": "MappingType", "_data": "SYMMETRIC"}


def _name(value: Any) -> Any:
    return value.get("_type") if isinstance(value, dict) else None


def _read(parts: Parts, codes: str, scale: str, zero: str, format: Format) -> QuantizedMatrix:
    data = parts.raw(codes)
    rows, groups = data.shape[0], format.num_groups(data.shape[1])
    checked = check_fp8(codes, data) if format.numbers == "fp8" else check_range(codes, data, format)
    scales = spread(parts.scales(scale).reshape(-1, groups), rows, format.rows)
    zeros = None
    if zero:
        zeros = spread(check_range(zero, parts.raw(zero), format).reshape(-1, groups), rows, format.rows)
    return QuantizedMatrix(format, checked, np.ascontiguousarray(scales), zeros)
