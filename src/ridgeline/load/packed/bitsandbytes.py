"""bitsandbytes: LLM.int8(), whose rows have one scale, and nf4, whose scales may be quantized themselves.

int8: `weight` int8 [out, in], `SCB` float32 [out], the largest magnitude of each row, and `weight_format`, where 0
means that rows are stored one after the other. nf4: `weight` uint8 [out * in / 2, 1] with two codes in a byte, the
upper half first; `weight.absmax`, the largest magnitude of each block of neighbors; `weight.quant_map`, the numbers of
the codes; and a JSON text in `weight.quant_state.bitsandbytes__nf4`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from math import gcd, prod
from typing import Any

import numpy as np

from ridgeline.archs.quantization import BnbInt8, BnbNf4
from ridgeline.errors import CheckpointError, RequestError
from ridgeline.load.packed.parts import Found, Parts, check_scales, lazily
from ridgeline.load.safetensors import HostTensor, TensorFiles
from ridgeline.load.stored import Ndarray, Stored
from ridgeline.ops.api import QuantizedMatrix
from ridgeline.spec.quant import LARGEST_GROUP, NUMBERS, OUTLIER, Format

STEPS = np.float32(127)
STATE = ".weight.quant_state.bitsandbytes__nf4"
_STATE_BYTES = 1 << 16
_LEAST_GROUP = 8  # smaller groups would take more bytes for scales than for codes


def read_int8(scheme: BnbInt8, files: TensorFiles) -> Found:
    """Return the matrices. Raises CheckpointError for parts that are missing or do not fit each other."""
    parts, found = Parts(files), Found()
    format = Format("int8", activations=scheme.activations)
    for module in parts.modules(".SCB"):
        shape = parts.matrix(f"{module}.weight", "I8")
        parts.expect(f"{module}.SCB", ("F32",), (shape[0],))
        names = [f"{module}.weight", f"{module}.SCB"]
        if parts.has(f"{module}.weight_format"):
            parts.expect(f"{module}.weight_format", ("U8",), (), (1,))
            if layout := int(parts.raw(f"{module}.weight_format").reshape(-1)[0]):
                raise CheckpointError(
                    f"{module}.weight_format is {layout}; only 0, rows one after the other, is read: save the model "
                    "again with a current bitsandbytes"
                )
            names.append(f"{module}.weight_format")
        found.stored[f"{module}.weight"] = Stored(format, shape, tuple(names), lazily(_int8, parts, module, format))
    return found


def _int8(parts: Parts, module: str, format: Format) -> QuantizedMatrix:
    codes, name = parts.raw(f"{module}.weight"), f"{module}.SCB"
    peaks = parts.scales(name, zero=True)  # the scale of a row of zeros
    _check_zeros(name, peaks, np.asarray(codes.any(1)))
    return QuantizedMatrix(format, codes, (peaks / STEPS)[:, None])


def _check_zeros(name: str, peaks: Ndarray, has_numbers: Ndarray) -> None:
    """Raise CheckpointError where a largest magnitude is 0, but the codes are not those of zeros."""
    if (has_numbers & (peaks == 0)).any():
        check_scales(name, np.where(has_numbers, peaks, np.float32(1)))


def read_nf4(scheme: BnbNf4, files: TensorFiles) -> Found:
    """Return the matrices. Raises CheckpointError for parts that are missing or do not fit each other."""
    parts, found = Parts(files), Found()
    for module in parts.modules(STATE):
        found.stored[f"{module}.weight"] = _stored_nf4(parts, module)
    return found


def _stored_nf4(parts: Parts, module: str) -> Stored:
    name, state = f"{module}.weight", _state(parts, module)
    rows, columns = state["shape"]
    block, count = state["blocksize"], rows * columns
    if prod(parts.expect(name, ("U8",))) != -(-count // 2):
        raise CheckpointError(
            f"{name} is {list(parts.info(name).shape)}, but {rows} x {columns} codes need {-(-count // 2)}"
        )
    group = gcd(columns, block)  # a block may continue in the next row, but no group of this size lies in two blocks
    if group < _LEAST_GROUP:
        raise CheckpointError(
            f"{name} has {columns} columns in blocks of {block}: no group of {_LEAST_GROUP} or more columns divides "
            "both, so this matrix cannot be read; quantize the model in another format"
        )
    names, blocks = [name, f"{module}{STATE}", f"{name}.absmax", f"{name}.quant_map"], -(-count // block)
    parts.expect(f"{name}.quant_map", ("F32",), (16,))
    if "nested_blocksize" in state:
        parts.expect(f"{name}.absmax", ("U8",), (blocks,))
        parts.expect(f"{name}.nested_absmax", ("F32",), (-(-blocks // state["nested_blocksize"]),))
        parts.expect(f"{name}.nested_quant_map", ("F32",), (256,))
        names += [f"{name}.nested_absmax", f"{name}.nested_quant_map"]
    else:
        parts.expect(f"{name}.absmax", ("F32",), (blocks,))
    format = Format("nf4", group)
    return Stored(format, (rows, columns), tuple(names), lazily(_nf4, parts, name, state, format))


def _state(parts: Parts, module: str) -> dict[str, Any]:
    """Return the fields of a module's JSON text. Raises CheckpointError for unknown, missing and bad ones."""
    name = f"{module}{STATE}"
    if (size := parts.vector(name, "U8")) > _STATE_BYTES:
        raise CheckpointError(f"{name} has {size} bytes; at most {_STATE_BYTES} are read")
    try:
        state = json.loads(parts.raw(name).tobytes().decode())
        shape, block = state["shape"], state["blocksize"]
        nested = [state[key] for key in ("nested_blocksize",) if key in state]
        sizes = [*shape, block, *nested]
        offset = state.get("nested_offset", 0.0)
        good = (
            len(shape) == 2
            and all(type(n) is int and 0 < n < 2**40 for n in sizes)
            and block <= LARGEST_GROUP
            and type(offset) in (int, float)
            and abs(offset) < float("inf")
            and state["quant_type"] == "nf4"
            and not set(state) - _STATE_FIELDS
        )
    except (ValueError, KeyError, TypeError, RecursionError) as e:
        raise CheckpointError(f"{name} is not readable: {type(e).__name__}: {str(e)[:80]}") from None
    if not good:
        raise CheckpointError(f"{name} has fields that are not understood: {json.dumps(state)[:200]}")
    return dict(state)


_STATE_FIELDS = frozenset(
    "quant_type blocksize dtype shape nested_blocksize nested_dtype nested_offset".split()
)  # fmt: skip


def _nf4(parts: Parts, name: str, state: dict[str, Any], format: Format) -> QuantizedMatrix:
    rows, columns = state["shape"]
    levels = np.array(NUMBERS["nf4"].levels, np.float32)
    if not np.allclose(parts.floats(f"{name}.quant_map"), levels, rtol=0, atol=1e-6):
        raise CheckpointError(f"{name}.quant_map does not hold the numbers of nf4")
    data = parts.raw(name).reshape(-1)
    codes = np.stack((data >> 4, data & 15), 1).reshape(-1)[: rows * columns].reshape(rows, columns)
    peaks = _peaks(parts, name, state)
    starts = np.arange(rows * columns // format.group) * format.group // state["blocksize"]
    scales = peaks[starts].reshape(rows, -1)
    zero = np.uint8(NUMBERS["nf4"].levels.index(0.0))
    if (scales == 0).any():
        _check_zeros(f"{name}.absmax", scales, (codes != zero).reshape(rows, -1, format.group).any(2))
    return QuantizedMatrix(format, codes, scales)


def _peaks(parts: Parts, name: str, state: dict[str, Any]) -> Ndarray:
    """Return the largest magnitude of each block, float32."""
    if "nested_blocksize" not in state:
        return parts.scales(f"{name}.absmax", zero=True)
    codes, size = parts.raw(f"{name}.absmax"), state["nested_blocksize"]
    numbers, stored = parts.floats(f"{name}.nested_quant_map")[codes], parts.scales(f"{name}.nested_absmax", zero=True)
    _check_blocks(f"{name}.nested_absmax", stored, codes, size)
    outer = np.repeat(stored, min(size, len(codes)))[: len(codes)]
    return check_scales(f"{name}.absmax", numbers * outer + np.float32(state.get("nested_offset", 0.0)), zero=True)


def _check_blocks(name: str, scales: Ndarray, codes: Ndarray, size: int) -> None:
    """Raise CheckpointError where the scale of a block of `size` codes is 0, but its codes differ."""
    if (scales == 0).any():
        padded = np.full(len(scales) * min(size, len(codes)), codes[-1], codes.dtype)
        padded[: len(codes)] = codes
        blocks = padded.reshape(len(scales), -1)
        _check_zeros(name, scales, np.asarray((blocks != blocks[:, :1]).any(1)))


def refuses_int8(matrix: QuantizedMatrix) -> str:
    """Return why a matrix cannot be written as bitsandbytes int8; an empty text if it can."""
    format, scales = matrix.format, np.asarray(matrix.scales)
    if (format.numbers, format.group, format.rows, format.offsets) != ("int8", 0, 1, "none"):
        return "bitsandbytes int8 holds 8 bits with one scale for each row, without zero points (int8-outliers)"
    if format.activations not in ("outliers", "int8") or matrix.input_scale is not None:
        return "bitsandbytes int8 rounds activations for each token (int8, int8-outliers)"
    if matrix.permutation is not None:
        return "bitsandbytes int8 has no order of columns"
    if not np.array_equal(_peaks_of(scales) / STEPS, scales):
        return "bitsandbytes int8 stores 127 times each scale, which float32 cannot hold without changing the scale"
    return ""


def _peaks_of(scales: Ndarray) -> Ndarray:
    """Return the float32 numbers that give the scales when they are divided by 127, where there are such numbers."""
    peaks: Ndarray = scales * STEPS
    for towards in (0, np.inf):
        other = np.nextafter(peaks, np.float32(towards))
        peaks = np.where((peaks / STEPS != scales) & (other / STEPS == scales), other, peaks)
    return peaks


def write_int8(module: str, matrix: Any) -> dict[str, HostTensor]:
    """Return the tensors of a matrix that `refuses_int8` accepts."""
    return {
        f"{module}.weight": HostTensor(np.ascontiguousarray(matrix.codes), "int8"),
        f"{module}.SCB": HostTensor(np.ascontiguousarray(_peaks_of(matrix.scales[:, 0])), "float32"),
        f"{module}.weight_format": HostTensor(np.zeros((), np.uint8), "uint8"),
    }


def config_int8(matrices: Mapping[str, QuantizedMatrix], kept: Sequence[str]) -> dict[str, Any]:
    """Return the quantization_config. Raises RequestError for matrices whose activations are taken in several ways."""
    ways = {matrix.format.activations for matrix in matrices.values()}
    if len(ways) > 1:
        raise RequestError("bitsandbytes int8 takes the activations of all matrices in one way")
    return {
        "quant_method": "bitsandbytes", "load_in_8bit": True, "load_in_4bit": False,
        "llm_int8_threshold": OUTLIER if "outliers" in ways else 0.0, "llm_int8_has_fp16_weight": False,
        "llm_int8_enable_fp32_cpu_offload": False, "llm_int8_skip_modules": sorted({"lm_head", *kept} - set(matrices)),
    }  # fmt: skip
