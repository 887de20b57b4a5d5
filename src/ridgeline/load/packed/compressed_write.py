"""Write compressed-tensors: pack-quantized, int-quantized and float-quantized, with a config group for each format."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ridgeline.archs.quantization import INTEGERS
from ridgeline.load.packed import bits as packing
from ridgeline.load.packed.parts import is_half
from ridgeline.load.safetensors import HostTensor
from ridgeline.load.stored import Ndarray
from ridgeline.ops.api import QuantizedMatrix
from ridgeline.spec.quant import NUMBERS, Format


def refuses(matrix: QuantizedMatrix) -> str:
    """Return why a matrix cannot be written as compressed-tensors; an empty text if it can."""
    format = matrix.format
    if format.activations == "outliers":
        return "compressed-tensors has no activations with outliers"
    if matrix.permutation is not None:
        return "loaders of compressed-tensors read no order of columns any more"
    if format.numbers == "fp8":
        return "" if format.group == 0 or format.rows > 1 else "compressed-tensors has fp8 by tensor, row or block only"
    if (
        format.bits not in INTEGERS
        or NUMBERS[format.numbers].levels
        or format.offsets == "minimums"
        or format.rows != 1
        or format.block
    ):
        return f"compressed-tensors holds {', '.join(map(str, INTEGERS))} bits by group or row, or fp8"
    if format.group and matrix.shape[1] % format.group:
        return "compressed-tensors has no short last group"
    if format.activations == "fp8":
        return "weights in whole numbers go with exact or int8 activations"
    return ""


def name_of(format: Format) -> str:
    """Return compressed-tensors' name of the way in which matrices of a format are stored."""
    if format.numbers == "fp8":
        return "float-quantized"
    return "int-quantized" if (format.bits, format.activations) == (8, "int8") else "pack-quantized"


def write(module: str, matrix: Any) -> dict[str, HostTensor]:
    """Return the tensors of a matrix that `refuses` accepts."""
    format, name, kind = matrix.format, f"{module}.weight", name_of(matrix.format)
    out = {f"{name}_scale": _scales(_stored(matrix.scales, format))}
    if kind == "pack-quantized":
        out[f"{name}_packed"] = HostTensor(_pack(matrix.codes, format.bits), "int32")
        out[f"{name}_shape"] = HostTensor(np.array(matrix.shape, np.int64), "int64")
    else:
        out[name] = HostTensor(np.ascontiguousarray(matrix.codes), "fp8" if kind == "float-quantized" else "int8")
    if matrix.zero_points is not None:
        if kind == "pack-quantized":
            along_out = np.ascontiguousarray(_pack(matrix.zero_points.T, format.bits).T)
            out[f"{name}_zero_point"] = HostTensor(along_out, "int32")
        else:
            out[f"{name}_zero_point"] = HostTensor(np.ascontiguousarray(matrix.zero_points), "int8")
    if matrix.input_scale is not None:
        out[f"{module}.input_scale"] = HostTensor(np.array([matrix.input_scale], np.float32), "float32")
    return out


def _pack(codes: Ndarray, bits: int) -> Ndarray:
    return packing.pack((codes.astype(np.int16) + (1 << (bits - 1))).astype(np.uint8), bits)


def _stored(scales: Ndarray, format: Format) -> Ndarray:
    """Return the scales as they are stored: one number, or one for each row, group or block."""
    if format.rows == 0:
        return scales[0, :1]
    return scales if format.rows == 1 else scales[:: format.rows]


def _scales(scales: Ndarray) -> HostTensor:
    """Return scales in float16 where it holds them, else in float32."""
    if is_half(scales):
        return HostTensor(np.ascontiguousarray(scales.astype(np.float16)), "float16")
    return HostTensor(np.ascontiguousarray(scales), "float32")


def config(matrices: Mapping[str, QuantizedMatrix], kept: Sequence[str]) -> dict[str, Any]:
    """Return the quantization_config: the group of most matrices has the class Linear as its target, others names."""
    kinds = Counter((matrix.format, matrix.input_scale is not None) for matrix in matrices.values())
    groups: dict[str, Any] = {}
    for i, (kind, _) in enumerate(kinds.most_common()):
        members = [m for m, x in matrices.items() if (x.format, x.input_scale is not None) == kind]
        groups[f"group_{i}"] = {
            "targets": members if i else ["Linear"], "weights": _weights(kind[0]), "input_activations": _inputs(*kind),
            "output_activations": None, "format": name_of(kind[0]),
        }  # fmt: skip
    names = {group["format"] for group in groups.values()}
    return {
        "quant_method": "compressed-tensors", "format": names.pop() if len(names) == 1 else "mixed-precision",
        "quantization_status": "compressed", "config_groups": groups,
        "ignore": sorted({"lm_head", *kept} - set(matrices)), "kv_cache_scheme": None, "global_compression_ratio": None,
    }  # fmt: skip


def _weights(format: Format) -> dict[str, Any]:
    strategy = "tensor" if format.rows == 0 else "block" if format.rows > 1 else "group" if format.group else "channel"
    block = {"block_structure": [format.rows, format.group]} if strategy == "block" else {}
    return {
        "num_bits": format.bits, "type": "float" if format.numbers == "fp8" else "int", "strategy": strategy,
        "symmetric": format.offsets == "none", "group_size": format.group if strategy == "group" else None,
        "dynamic": False, **block,
    }  # fmt: skip


def _inputs(format: Format, static: bool) -> dict[str, Any] | None:
    if format.activations == "exact":
        return None
    return {
        "num_bits": 8, "type": "float" if format.activations == "fp8" else "int", "symmetric": True,
        "strategy": "tensor" if static else "token", "dynamic": not static, "group_size": None,
    }  # fmt: skip
