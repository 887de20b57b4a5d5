"""compressed-tensors (llm-compressor): packed or whole bytes, NVFP4 and MXFP4, each module by its config group.

For a matrix [out, in], the parts of a module are `weight_packed` int32 [out, words] with numbers of any bits in a row,
or `weight` in int8 or fp8, or `weight_packed` uint8 [out, in / 2] with two fp4 numbers in a byte, the lower half first.
`weight_scale` is [1], [out, 1], [out, groups] or a number for each block. `weight_zero_point` is packed along the
output.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import numpy as np

from ridgeline.archs.quantization import CompressedTensors, Group
from ridgeline.errors import CheckpointError
from ridgeline.load.packed import bits as packing
from ridgeline.load.packed.gptq import permutation
from ridgeline.load.packed.match import match_names
from ridgeline.load.packed.parts import (
    E4M3,
    FLOATS,
    Found,
    Parts,
    check_fp8,
    check_scales,
    lazily,
    signed,
    spread,
)
from ridgeline.load.safetensors import TensorFiles
from ridgeline.load.stored import Ndarray, Stored
from ridgeline.ops.api import QuantizedMatrix
from ridgeline.spec.quant import NUMBERS, Format

_PATTERN = "re:"
LARGEST_POWER = 252  # stands for 2**125; 6 * 2**126 would be infinite, and 255 is NaN
_TABLES = re.compile(r"(embed\w*|wte|wpe)$")  # the ends of the names of embeddings
# Names of classes as targets: of matrices that are multiplied, and of embeddings.
CLASSES: Mapping[bool, tuple[str, ...]] = {False: ("Linear", "LinearBase"), True: ("Embedding",)}
_ALL_CLASSES = frozenset(name for names in CLASSES.values() for name in names)


def read(scheme: CompressedTensors, files: TensorFiles) -> Found:
    """Return the matrices, and the scales of KV caches. Raises CheckpointError for parts that do not fit the config."""
    parts = Parts(files)
    found = Found(kv_scales=parts.kv_scales())
    modules = sorted({*parts.modules(".weight_packed"), *parts.modules(".weight_scale")})
    for module, group in groups_of(scheme, modules).items():
        found.stored[f"{module}.weight"] = _stored(parts, module, group)
    return found


def groups_of(scheme: CompressedTensors, modules: list[str]) -> dict[str, Group]:
    """Return the config group of each module: that of its name, else of a pattern, else of a class.

    Entries of `ignore` may name modules that the file does not have: a tied head, parts of the model that it leaves
    out. They have no codes, so that such an entry changes nothing.

    Raises CheckpointError for a module that is ignored or that no group names, and for a name, a pattern or a class
    among the targets that takes no module.
    """
    targets = sorted((target, group) for group, g in enumerate(scheme.groups) for target in g.targets)
    patterns = [(t.removeprefix(_PATTERN), g) for t, g in targets if t.startswith(_PATTERN)]
    ignored = [t.removeprefix(_PATTERN) for t in scheme.ignore if t.startswith(_PATTERN)]
    matches = match_names([*(p for p, _ in patterns), *ignored], modules)
    exact = dict(reversed(targets))
    classes = {is_table: [g for t, g in targets if t in CLASSES[is_table]] for is_table in CLASSES}
    out: dict[str, Group] = {}
    for module in modules:
        if module in scheme.ignore or any(i >= len(patterns) for i in matches[module]):
            raise CheckpointError(f"{module} has codes, but quantization_config lists it in ignore")
        candidates = [exact[module]] if module in exact else [patterns[i][1] for i in matches[module]]
        candidates = candidates or classes[_TABLES.search(module) is not None]
        if not candidates:
            raise CheckpointError(f"{module} has codes, but no group of quantization_config has it as a target")
        out[module] = scheme.groups[candidates[0]]
    used = {patterns[i][0] for found in matches.values() for i in found if i < len(patterns)}
    for target, _ in targets:
        is_pattern = target.startswith(_PATTERN)
        known = target.removeprefix(_PATTERN) in used if is_pattern else target in out or target in _ALL_CLASSES
        if not known:
            raise CheckpointError(
                f"quantization_config has the target {target[:100]!r}, which takes no matrix with codes; correct or "
                f"remove it (known classes are {', '.join(sorted(_ALL_CLASSES))})"
            )
    return out


def _stored(parts: Parts, module: str, group: Group) -> Stored:
    """Return a module's matrix. Raises CheckpointError for parts that do not fit each other or the group."""
    name, format = f"{module}.weight", group.format
    names = [f"{name}_scale"]
    if group.packing == "bytes":
        shape = parts.matrix(name, E4M3 if format.numbers == "fp8" else "I8")
        names.append(name)
    elif group.packing == "packed":
        shape = _packed_shape(parts, name, format.bits)
        names += [f"{name}_packed", f"{name}_shape"]
    else:
        rows, half = parts.matrix(f"{name}_packed", "U8")
        shape = rows, 2 * half
        names.append(f"{name}_packed")
        if group.packing == "nvfp4":
            parts.expect(f"{name}_global_scale", ("F32",), (), (1,))
            names.append(f"{name}_global_scale")
    scales = _scale_shapes(format, shape)
    types = {"nvfp4": (E4M3,), "mxfp4": ("U8", "F8_E8M0")}.get(group.packing, FLOATS)
    if parts.info(f"{name}_scale").shape not in scales:
        listed = " or ".join(str(list(s)) for s in scales)
        raise CheckpointError(
            f"{name}_scale is {list(parts.info(f'{name}_scale').shape)}, but {format.name} with {list(shape)} numbers "
            f"needs {listed}; check group_size and strategy in quantization_config"
        )
    parts.expect(f"{name}_scale", types)
    if format.offsets == "zero_points":
        packed = group.packing == "packed" and format.rows == 1
        sizes = ((packing.words(shape[0], format.bits), format.num_groups(shape[1])),) if packed else scales
        parts.expect(f"{name}_zero_point", ("I32",) if packed else ("I8",), *sizes)
        names.append(f"{name}_zero_point")
    if group.ordered and parts.has(f"{name}_g_idx"):
        parts.expect(f"{name}_g_idx", ("I32", "I64"), (shape[1],))
        names.append(f"{name}_g_idx")
    names += _input_parts(parts, module, group)
    return Stored(format, shape, tuple(names), lazily(_read, parts, module, group, shape))


def _packed_shape(parts: Parts, name: str, bits: int) -> tuple[int, int]:
    """Return the shape that a module states, which must fit its words."""
    parts.expect(f"{name}_shape", ("I64", "I32"), (2,))
    rows, columns = (int(n) for n in parts.raw(f"{name}_shape"))
    found = parts.matrix(f"{name}_packed", "I32")
    if columns < 1 or found != (rows, packing.words(columns, bits)):
        raise CheckpointError(
            f"{name}_packed is {list(found)}, but {[rows, columns]} numbers of {bits} bits need "
            f"{[rows, packing.words(max(columns, 0), bits)]}; check num_bits in quantization_config"
        )
    return rows, columns


def _scale_shapes(format: Format, shape: tuple[int, int]) -> tuple[tuple[int, ...], ...]:
    """Return the shapes that the scales of a matrix may have."""
    rows, groups = shape[0], format.num_groups(shape[1])
    if format.rows == 0:
        return (1,), (), (1, 1)
    if format.rows > 1:
        return ((-(-rows // format.rows), groups),)
    return ((rows, groups),) if format.group else ((rows, 1), (rows,))


def _input_parts(parts: Parts, module: str, group: Group) -> list[str]:
    """Return the names of the parts that describe a module's input. Raises CheckpointError for a missing one."""
    if not group.static_input:
        return []
    if group.format.activations != "exact":
        parts.expect(f"{module}.input_scale", FLOATS, (), (1,))
    names = [f"{module}.{part}" for part in ("input_scale", "input_zero_point", "input_global_scale")]
    return [name for name in names if parts.has(name)]


def _read(parts: Parts, module: str, group: Group, shape: tuple[int, int]) -> QuantizedMatrix:
    name, format = f"{module}.weight", group.format
    scales, order = _scales(parts, name, group, shape), None
    if f"{name}_g_idx" in _names(parts, name, group):
        members = parts.raw(f"{name}_g_idx")
        order = None if (members == -1).all() else permutation(f"{name}_g_idx", members, format.group or shape[1])
    codes = _codes(parts, name, group, shape)
    zeros = _zero_points(parts, name, group, shape) if format.offsets == "zero_points" else None
    return QuantizedMatrix(
        format,
        codes if order is None else codes[:, order],
        scales,
        zeros,
        order,
        None,
        _input_scale(parts, module, group),
    )


def _names(parts: Parts, name: str, group: Group) -> tuple[str, ...]:
    return (f"{name}_g_idx",) if group.ordered and parts.has(f"{name}_g_idx") else ()


def _codes(parts: Parts, name: str, group: Group, shape: tuple[int, int]) -> Ndarray:
    format = group.format
    if group.packing == "packed":
        return signed(packing.unpack(parts.raw(f"{name}_packed"), format.bits, shape[1]), format.bits)
    if group.packing != "bytes":
        return packing.unpack(parts.raw(f"{name}_packed"), 4, shape[1])
    codes = parts.raw(name)
    if format.numbers == "fp8":
        return check_fp8(name, codes)
    return check_range(name, codes, format)


def check_range(name: str, codes: Ndarray, format: Format) -> Ndarray:
    """Return whole numbers. Raises CheckpointError for one that the format's bits cannot hold."""
    low, high = NUMBERS[format.numbers].low, NUMBERS[format.numbers].high
    if format.bits < 8 and not (low <= codes.min() and codes.max() <= high):
        raise CheckpointError(f"{name} has numbers from {codes.min()} to {codes.max()}, but {format.bits} bits hold "
                              f"{low} to {high}")  # fmt: skip
    return codes


def _scales(parts: Parts, name: str, group: Group, shape: tuple[int, int]) -> Ndarray:
    """Return the scales of each row, float32 [out, groups]."""
    format, rows = group.format, shape[0]
    if group.packing == "nvfp4":
        stored = np.array(NUMBERS["fp8"].levels, np.float32)[parts.raw(f"{name}_scale")]
        return check_scales(f"{name}_scale", stored / np.float32(parts.scalar(f"{name}_global_scale")))
    if group.packing == "mxfp4":
        return powers(f"{name}_scale", parts.raw(f"{name}_scale"))
    stored = parts.scales(f"{name}_scale").reshape(-1, format.num_groups(shape[1]))
    return spread(stored, rows, format.rows)


def powers(name: str, exponents: Ndarray) -> Ndarray:
    """Return 2 ** (exponent - 127), float32. Raises CheckpointError for exponents whose products are not finite."""
    if (largest := int(exponents.max(initial=0))) > LARGEST_POWER:
        raise CheckpointError(f"{name} has a scale of {largest}; above {LARGEST_POWER} numbers are not finite")
    out: Ndarray = np.ldexp(np.float32(1), exponents.astype(np.int32) - 127)
    return out


def _zero_points(parts: Parts, name: str, group: Group, shape: tuple[int, int]) -> Ndarray:
    """Return the zero points of each row, int8 [out, groups]."""
    format, rows = group.format, shape[0]
    stored = parts.raw(f"{name}_zero_point")
    if group.packing == "packed" and format.rows == 1:
        return np.ascontiguousarray(signed(packing.unpack(stored.T, format.bits, rows), format.bits).T)
    checked = check_range(f"{name}_zero_point", stored, format).reshape(-1, format.num_groups(shape[1]))
    return spread(checked, rows, format.rows)


def _input_scale(parts: Parts, module: str, group: Group) -> float | None:
    """Return the scale of a module's input. Raises CheckpointError for zero points of a symmetric input."""
    if not group.static_input:
        return None
    if group.format.activations == "exact":
        for part in ("input_scale", "input_global_scale"):
            if parts.has(given := f"{module}.{part}"):
                parts.expect(given, FLOATS)
                parts.scales(given)  # they are not applied, but damaged ones say that the file is damaged
        return None
    name = f"{module}.input_zero_point"
    if parts.has(name) and np.any(parts.raw(name)):
        raise CheckpointError(f"{name} is not 0, but quantization_config says that activations are symmetric")
    return parts.scalar(f"{module}.input_scale")
