"""GPTQ, v1 and v2: 2, 3, 4 or 8 bits, packed along the input, with columns in any order.

For a matrix [out, in] the checkpoint has `qweight` int32 [in * bits / 32, out], `qzeros` int32
[groups, out * bits / 32], `scales` [groups, out] and `g_idx` int32 [in], the group of each column. v1 stores zero
points minus one.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ridgeline.archs.quantization import INTEGERS, Gptq
from ridgeline.archs.quantization.gptq import BITS
from ridgeline.errors import CheckpointError
from ridgeline.load.packed import bits as packing
from ridgeline.load.packed.match import match_names
from ridgeline.load.packed.parts import FLOATS, Found, Parts, is_half, lazily, signed
from ridgeline.load.safetensors import HostTensor, TensorFiles
from ridgeline.load.stored import Ndarray, Stored
from ridgeline.ops.api import QuantizedMatrix
from ridgeline.spec.quant import NUMBERS, Format


def read(scheme: Gptq, files: TensorFiles) -> Found:
    """Return the matrices. Raises CheckpointError for parts that are missing or do not fit each other."""
    parts, found = Parts(files), Found()
    modules = list(parts.modules(".qweight"))
    rules = match_names([rule.pattern for rule in scheme.dynamic], modules)
    for module in modules:
        own = scheme
        if rules[module]:
            rule = scheme.dynamic[rules[module][0]]
            if rule.skip:
                raise CheckpointError(
                    f"{module} has codes, but the rule {rule.pattern!r} says that it is not quantized"
                )
            changes: dict[str, Any] = {"bits": rule.bits, "group": rule.group, "symmetric": rule.symmetric}
            own = replace(scheme, **{name: value for name, value in changes.items() if value is not None})
        found.stored[f"{module}.weight"] = _stored(parts, module, own)
    return found


def _stored(parts: Parts, module: str, scheme: Gptq) -> Stored:
    words, rows = parts.matrix(f"{module}.qweight", "I32")
    columns = parts.vector(f"{module}.g_idx", "I32", "I64")
    format = Format(INTEGERS[scheme.bits], scheme.group, 1, "none" if scheme.symmetric else "zero_points")
    if words != packing.words(columns, scheme.bits) or columns * scheme.bits % packing.WORD:
        raise CheckpointError(
            f"{module}.qweight has {words} rows, but {columns} inputs of {scheme.bits} bits need "
            f"{columns * scheme.bits / packing.WORD:g}; check bits in quantization_config"
        )
    groups = format.num_groups(columns)
    if parts.info(f"{module}.scales").shape != (groups, rows):
        raise CheckpointError(
            f"{module}.scales is {list(parts.info(f'{module}.scales').shape)}, but group_size {scheme.group or -1} "
            f"needs {[groups, rows]} for {rows} x {columns} numbers; check group_size in quantization_config"
        )
    parts.expect(f"{module}.scales", FLOATS)
    parts.expect(f"{module}.qzeros", ("I32",), (groups, packing.words(rows, scheme.bits)))
    names = tuple(f"{module}.{part}" for part in ("qweight", "qzeros", "scales", "g_idx"))
    return Stored(format, (rows, columns), names, lazily(_read, parts, module, scheme, format, (rows, columns)))


def _read(parts: Parts, module: str, scheme: Gptq, format: Format, shape: tuple[int, int]) -> QuantizedMatrix:
    rows, columns = shape
    scales = np.ascontiguousarray(parts.scales(f"{module}.scales").T)
    zeros = zero_points(parts.raw(f"{module}.qzeros"), scheme, rows)
    order = permutation(f"{module}.g_idx", parts.raw(f"{module}.g_idx"), format.group or columns)
    numbers = packing.unpack(parts.raw(f"{module}.qweight").T, scheme.bits, columns)
    codes = signed(numbers if order is None else numbers[:, order], scheme.bits)
    if scheme.symmetric:
        middle = 1 << (scheme.bits - 1)
        if (zeros != middle).any():
            raise CheckpointError(
                f"{module}.qzeros has the zero point {int(zeros[zeros != middle][0])}, but sym is true, where each is "
                f"{middle}; set sym to false, or check checkpoint_format in quantization_config"
            )
        return QuantizedMatrix(format, codes, scales, None, order)
    return QuantizedMatrix(format, codes, scales, np.ascontiguousarray(signed(zeros, scheme.bits).T), order)


def zero_points(packed: Ndarray, scheme: Gptq, rows: int) -> Ndarray:
    """Return the zero points of packed words [groups, n], uint8 [groups, out]."""
    step = 1 << scheme.bits
    if not scheme.stored_less_one:
        return packing.unpack(packed, scheme.bits, rows)
    if scheme.whole_words and packing.WORD % scheme.bits == 0:
        ones = sum(1 << i for i in range(0, packing.WORD, scheme.bits))
        return packing.unpack(packed.view(np.uint32) + np.uint32(ones), scheme.bits, rows)
    return (packing.unpack(packed, scheme.bits, rows) + np.uint8(1)) & np.uint8(step - 1)


def permutation(name: str, groups: Ndarray, group: int) -> Ndarray | None:
    """Return the order of columns that puts the members of each group side by side; None where they are already.

    groups: the group of each column. Raises CheckpointError unless each group has `group` members, the last at most.
    """
    groups, wanted = np.asarray(groups), np.arange(len(groups)) // group
    if np.array_equal(groups, wanted):
        return None
    order = np.argsort(groups, kind="stable")
    if not np.array_equal(groups[order], wanted):
        raise CheckpointError(
            f"{name} does not put {group} columns into each group of 0 to {wanted[-1]}; the order of columns is "
            "damaged, or group_size in quantization_config is wrong"
        )
    return order


def refuses(matrix: QuantizedMatrix) -> str:
    """Return why a matrix cannot be written as GPTQ; an empty text if it can."""
    format, (rows, columns) = matrix.format, matrix.shape
    is_whole = format.bits in BITS and not NUMBERS[format.numbers].levels and format.offsets != "minimums"
    if not is_whole or format.rows != 1 or format.block:
        return f"GPTQ holds {', '.join(map(str, BITS))} bits with scales by group or row only"
    if format.activations != "exact":
        return "GPTQ has exact activations only"
    if rows * format.bits % packing.WORD or columns * format.bits % packing.WORD:
        return f"GPTQ packs whole words of {packing.WORD} bits, which {rows} x {columns} numbers do not fill"
    return "" if is_half(matrix.scales) else "GPTQ holds scales of float16 only"


def refuses_v1(matrix: QuantizedMatrix) -> str:
    """Return why a matrix cannot be written as GPTQ v1; an empty text if it can."""
    zeros: Any = matrix.zero_points
    if zeros is not None and (zeros == NUMBERS[matrix.format.numbers].low).any():
        return "GPTQ v1 stores zero points minus one, which loaders read differently for the lowest one"
    return refuses(matrix)


def write(module: str, matrix: Any, less: int = 0) -> dict[str, HostTensor]:
    """Return the tensors of a matrix that `refuses` accepts. less: the number that v1 subtracts from zero points."""
    format, (rows, columns) = matrix.format, matrix.shape
    middle, groups = 1 << (format.bits - 1), format.num_groups(columns)
    order = np.arange(columns) if matrix.permutation is None else np.asarray(matrix.permutation)
    numbers, members = np.empty((rows, columns), np.uint8), np.empty(columns, np.int32)
    numbers[:, order] = (matrix.codes.astype(np.int16) + middle).astype(np.uint8)
    members[order] = np.arange(columns) // (format.group or columns)
    zeros = np.zeros((rows, groups), np.int16) if matrix.zero_points is None else matrix.zero_points.astype(np.int16)
    return {
        f"{module}.qweight": HostTensor(np.ascontiguousarray(packing.pack(numbers, format.bits).T), "int32"),
        f"{module}.qzeros": HostTensor(packing.pack((zeros.T + middle - less).astype(np.uint8), format.bits), "int32"),
        f"{module}.scales": HostTensor(np.ascontiguousarray(matrix.scales.T.astype(np.float16)), "float16"),
        f"{module}.g_idx": HostTensor(members, "int32"),
    }


def write_v1(module: str, matrix: QuantizedMatrix) -> dict[str, HostTensor]:
    """Return the tensors of a matrix that `refuses_v1` accepts."""
    return write(module, matrix, less=1)


def config(matrices: Mapping[str, QuantizedMatrix], kept: Sequence[str]) -> dict[str, Any]:
    """Return the quantization_config of v2: the format of most matrices, and a rule for each of the others."""
    formats = Counter(matrix.format for matrix in matrices.values())
    main = formats.most_common(1)[0][0]
    rules: dict[str, Any] = {f"-:^{re.escape(module)}$": {} for module in kept}
    rules |= {f"+:^{re.escape(m)}$": _fields(x.format) for m, x in matrices.items() if x.format != main}
    return {
        "quant_method": "gptq", **_fields(main), "desc_act": any(m.permutation is not None for m in matrices.values()),
        "checkpoint_format": "gptq_v2", "format": "gptq_v2", "pack_dtype": "int32", "lm_head": "lm_head" in matrices,
        "true_sequential": True, "dynamic": rules,
    }  # fmt: skip


def config_v1(matrices: Mapping[str, QuantizedMatrix], kept: Sequence[str]) -> dict[str, Any]:
    """Return the quantization_config of v1."""
    return {**config(matrices, kept), "checkpoint_format": "gptq", "format": "gptq"}


def _fields(format: Format) -> dict[str, Any]:
    return {"bits": format.bits, "group_size": format.group or -1, "sym": format.offsets == "none"}
