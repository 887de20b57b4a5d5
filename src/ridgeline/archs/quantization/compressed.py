"""Read the config of compressed-tensors checkpoints (llm-compressor)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ridgeline.archs.config import Config
from ridgeline.archs.quantization.scheme import (
    INTEGERS,
    MAX_RULES,
    CompressedTensors,
    Group,
    Packing,
    get_texts,
    group_size,
)
from ridgeline.spec.quant import LARGEST_GROUP, Activations, Format, Offsets

HARMLESS = (
    "quant_method", "version", "quantization_status", "global_compression_ratio", "run_compressed",
    "moe_sparsity_config",
)  # fmt: skip
# How the numbers were found; the tensors show their types.
_ARGS_HARMLESS = ("observer", "observer_kwargs", "scale_dtype", "zp_dtype", "block_structure", "group_size")
_PACKINGS: Mapping[str, Packing] = {
    "pack-quantized": "packed", "int-quantized": "bytes", "float-quantized": "bytes", "naive-quantized": "bytes",
    "nvfp4-pack-quantized": "nvfp4", "mxfp4-pack-quantized": "mxfp4",
}  # fmt: skip
EXACT = "activations are taken exactly in {}: products with activations in {} are not computed"


def read(c: Config) -> CompressedTensors:
    """Return the scheme. Raises ConfigError for formats and strategies that are not read."""
    c.expect("sparsity_config", {}, {"format": "dense"})
    c.expect("transform_config", {})
    ignore = get_texts(c, "ignore")
    kv = c.sub("kv_cache_scheme")
    if kv is not None:
        check_kv(kv)
    default = c.get_str("format", "")
    raw = c.sub("config_groups")
    if raw is None or not (raw.filled or kv is not None) or len(raw.fields()) > MAX_RULES:
        raise c.error("config_groups", f"must hold 1 to {MAX_RULES} groups, or none beside a kv_cache_scheme")
    groups, notes = [], []
    for name in raw.fields():
        inside = raw.sub(name)
        if inside is None:
            raise raw.error(name, "is null; it must be an object")
        group, inputs = _group(inside, default)
        groups.append(group)
        if inputs:
            notes.append(EXACT.format(name, inputs))
    c.finish(HARMLESS)
    return CompressedTensors(tuple(notes), kv is not None, tuple(groups), ignore)


def _group(c: Config, default: str) -> tuple[Group, str]:
    """Return a group, and the type of its activations where products with them are not computed."""
    targets = get_texts(c, "targets")
    if not targets:
        raise c.error("targets", "is empty; it must name the modules")
    name = c.get_str("format", default, default) or default
    if name not in _PACKINGS:
        raise c.error("format", f"is {name!r}; read are {', '.join(_PACKINGS)}")
    c.expect("output_activations")
    weights, inputs = c.sub("weights"), c.sub("input_activations")
    if weights is None:
        raise c.error("weights", "is missing; groups that quantize only activations are not read")
    activations, static, other = _inputs(inputs)
    packing = _PACKINGS[name]
    format, ordered = _weights(weights, packing, activations)
    if format.numbers in ("fp8", "fp4") and activations == "int8":
        raise c.error("input_activations", "are int8, but weights in floats are multiplied with floats only")
    c.finish()
    return Group(targets, format, packing, ordered, static), other


def _weights(c: Config, packing: Packing, activations: Activations) -> tuple[Format, bool]:
    """Return the format of a group's weights, and whether their columns may be permuted."""
    bits, kind, symmetric = c.get_int("num_bits", 8), c.get_str("type", "int"), c.get_bool("symmetric", True)
    c.expect("dynamic", False)
    order = c.raw("actorder")
    if order not in (None, False, "weight", "static", "group", "dynamic"):
        raise c.error("actorder", f"is {order!r}; it must be weight or group")
    rows, group = _shared(c)
    c.finish((*_ARGS_HARMLESS, "strategy"))
    if kind == "float" and symmetric and bits == {"bytes": 8, "nvfp4": 4, "mxfp4": 4}.get(packing):
        sizes = {"nvfp4": 16, "mxfp4": 32}
        if packing in sizes and (rows, group) != (1, sizes[packing]):
            raise c.error("group_size", f"is {group}; {packing} has groups of {sizes[packing]}")
        return Format("fp8" if bits == 8 else "fp4", group, rows, "none", activations), False
    if kind != "int" or packing not in ("packed", "bytes") or bits not in INTEGERS:
        raise c.error("num_bits", f"is {bits} with type {kind!r}; this format is read with {_known(packing)}")
    offsets: Offsets = "none" if symmetric else "zero_points"
    return Format(INTEGERS[bits], group, rows, offsets, activations), order in ("group", "dynamic")


def _known(packing: Packing) -> str:
    whole = f"int of {', '.join(map(str, INTEGERS))} bits"
    return {"packed": whole, "bytes": f"{whole}, or symmetric float of 8"}.get(packing, "symmetric float of 4")


def _shared(c: Config) -> tuple[int, int]:
    """Return the rows and the columns that share a scale, as Format counts them."""
    size: Any = c.raw("group_size")
    strategy = c.get_str("strategy", None, None)
    if strategy is None:
        strategy = "tensor" if size is None else "channel" if size == -1 else "group"
    if strategy == "tensor":
        return 0, 0
    if strategy == "channel":
        return 1, 0
    if strategy in ("group", "tensor_group"):
        group = group_size(c)
        if not group:
            raise c.error("group_size", "is -1, but the strategy is group")
        return 1, group
    if strategy == "block":
        sizes = c.get_list("block_structure")
        if len(sizes) != 2 or not all(type(n) is int and 0 < n <= LARGEST_GROUP for n in sizes):
            raise c.error("block_structure", f"is {sizes!r}; it must be two positive numbers, rows and columns")
        return (sizes[0] if sizes[0] > 1 else 1), sizes[1]
    raise c.error("strategy", f"is {strategy!r}; tensor, channel, group, tensor_group and block are read")


def _inputs(c: Config | None) -> tuple[Activations, bool, str]:
    """Return how activations are taken, whether with one stored scale, and the name of a type that is not computed."""
    if c is None:
        return "exact", False, ""
    bits, kind, symmetric = c.get_int("num_bits", 8), c.get_str("type", "int"), c.get_bool("symmetric", True)
    strategy, dynamic = c.get_str("strategy", None, None), c.raw("dynamic")
    if dynamic not in (None, False, True, "local"):
        raise c.error("dynamic", f"is {dynamic!r}; it must be true, false or local")
    c.expect("actorder", False)
    c.finish(_ARGS_HARMLESS)
    static = not dynamic
    is_plain = bits == 8 and symmetric and kind in ("int", "float")
    if is_plain and (strategy in ("tensor", None) if static else strategy in ("token", None)):
        return ("int8" if kind == "int" else "fp8"), static, ""
    other = f"{kind}{bits}{'' if symmetric else ' with zero points'}"
    if is_plain:
        other += f" by {strategy}"
    return "exact", static or dynamic == "local", other


def check_kv(c: Config) -> None:
    """Raise ConfigError for a KV cache in other types than fp8 with one scale for each layer."""
    bits, kind, symmetric = c.get_int("num_bits", 8), c.get_str("type", "int"), c.get_bool("symmetric", True)
    if (bits, kind, symmetric) != (8, "float", True) or c.raw("strategy") not in (None, "tensor"):
        raise c.error("type", f"is {kind!r} of {bits} bits; scales of a KV cache are read for fp8 by tensor")
    c.expect("dynamic", False)
    c.expect("actorder", False)
    c.finish(_ARGS_HARMLESS)
