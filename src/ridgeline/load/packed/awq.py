"""AWQ in the layout "gemm": 4 bits with zero points, packed along the output in AutoAWQ's order.

For a matrix [out, in] the checkpoint has `qweight` int32 [in, out / 8], `qzeros` int32 [groups, out / 8] and `scales`
[groups, out]. A word holds 8 neighboring outputs; ORDER says which of them is in each 4 bits, from the lowest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ridgeline.archs.quantization import Awq
from ridgeline.errors import CheckpointError, RequestError
from ridgeline.load.packed.parts import FLOATS, Found, Parts, is_half, lazily
from ridgeline.load.safetensors import HostTensor, TensorFiles
from ridgeline.load.stored import Ndarray, Stored
from ridgeline.ops.api import QuantizedMatrix
from ridgeline.spec.quant import Format

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
PER_WORD = len(ORDER)


def read(scheme: Awq, files: TensorFiles) -> Found:
    """Return the matrices. Raises CheckpointError for parts that are missing or do not fit each other."""
    parts, found = Parts(files), Found()
    for module in parts.modules(".qweight"):
        found.stored[f"{module}.weight"] = _stored(parts, module, scheme.group)
    return found


def _stored(parts: Parts, module: str, group: int) -> Stored:
    columns, words = parts.matrix(f"{module}.qweight", "I32")
    format, rows = Format("int4", group, offsets="zero_points"), words * PER_WORD
    groups = format.num_groups(columns)
    if parts.info(f"{module}.scales").shape != (groups, rows):
        raise CheckpointError(
            f"{module}.scales is {list(parts.info(f'{module}.scales').shape)}, but group_size {group or -1} needs "
            f"{[groups, rows]} for {rows} x {columns} numbers; check group_size in quantization_config"
        )
    parts.expect(f"{module}.scales", FLOATS)
    parts.expect(f"{module}.qzeros", ("I32",), (groups, words))
    names = tuple(f"{module}.{part}" for part in ("qweight", "qzeros", "scales"))
    return Stored(format, (rows, columns), names, lazily(_read, parts, module, format))


def _read(parts: Parts, module: str, format: Format) -> QuantizedMatrix:
    scales = np.ascontiguousarray(parts.scales(f"{module}.scales").T)
    codes, zeros = (unpack(parts.raw(f"{module}.{part}")) for part in ("qweight", "qzeros"))
    return QuantizedMatrix(format, codes, scales, zeros)


def unpack(words: Ndarray) -> Ndarray:
    """Return words [n, out / 8] as numbers from -8 to 7, int8 [out, n]."""
    across = np.ascontiguousarray(words.T).view(np.uint8).reshape(words.shape[1], words.shape[0], 4)
    out = np.empty((across.shape[0], PER_WORD, across.shape[1]), np.int8)
    for byte in range(4):
        pair = np.ascontiguousarray(across[:, :, byte])
        for column, number in zip(ORDER[2 * byte :], (pair & 15, pair >> 4), strict=False):
            np.subtract(number.view(np.int8), np.int8(8), out=out[:, column])
    return out.reshape(-1, across.shape[1])


def pack(codes: Ndarray) -> Ndarray:
    """Return numbers from -8 to 7, int8 [out, n], as words [n, out / 8]. `out` must be a multiple of 8."""
    numbers = (codes.astype(np.int16) + 8).astype(np.uint32).reshape(-1, PER_WORD, codes.shape[1])
    out = np.zeros((numbers.shape[0], codes.shape[1]), np.uint32)
    for i, column in enumerate(ORDER):
        out |= numbers[:, column] << np.uint32(4 * i)
    return np.ascontiguousarray(out.T).view(np.int32)


def refuses(matrix: QuantizedMatrix) -> str:
    """Return why a matrix cannot be written as AWQ; an empty text if it can."""
    format, (rows, columns) = matrix.format, matrix.shape
    if (format.numbers, format.offsets, format.rows, format.activations) != ("int4", "zero_points", 1, "exact"):
        return "AWQ holds 4 bits with zero points and exact activations only (int4-asym-exact)"
    if rows % PER_WORD or (format.group and columns % format.group):
        return f"AWQ needs outputs in multiples of {PER_WORD}, and inputs in multiples of the group"
    if matrix.permutation is not None:
        return "AWQ has no order of columns"
    return "" if is_half(matrix.scales) else "AWQ holds scales of float16 only"


def write(module: str, matrix: Any) -> dict[str, HostTensor]:
    """Return the tensors of a matrix that `refuses` accepts."""
    return {
        f"{module}.qweight": HostTensor(pack(matrix.codes), "int32"),
        f"{module}.qzeros": HostTensor(pack(matrix.zero_points), "int32"),
        f"{module}.scales": HostTensor(np.ascontiguousarray(matrix.scales.T.astype(np.float16)), "float16"),
    }


def config(matrices: Mapping[str, QuantizedMatrix], kept: Sequence[str]) -> dict[str, Any]:
    """Return the quantization_config. Raises RequestError for matrices with groups of several sizes."""
    sizes = sorted({matrix.format.group for matrix in matrices.values()})
    if len(sizes) > 1:
        raise RequestError(f"AWQ has one size of groups, not {sizes}; take --format compressed-tensors")
    return {
        "quant_method": "awq", "bits": 4, "group_size": sizes[0] or -1, "zero_point": True, "version": "gemm",
        "modules_to_not_convert": [*kept] or None,
    }  # fmt: skip
