"""Scales of KV caches in fp8: the names that tools give to their tensors, and the layers that they belong to."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from ridgeline.errors import CheckpointError
from ridgeline.spec import ModelSpec
from ridgeline.spec.storage import UNSCALED, KVScales

# Ends of the names of such tensors, and whether they scale keys, values or both (`kv_scale` of older tools).
SUFFIXES: Mapping[str, str] = {
    ".self_attn.k_scale": "k", ".self_attn.v_scale": "v", ".k_proj.k_scale": "k", ".v_proj.v_scale": "v",
    ".qkv_proj.k_scale": "k", ".qkv_proj.v_scale": "v", ".k_proj.output_scale": "k", ".v_proj.output_scale": "v",
    ".attn.k_scale": "k", ".attn.v_scale": "v", ".self_attn.kv_scale": "kv", ".attn.kv_scale": "kv",
}  # fmt: skip
LEAST, MOST = 2.0**-64, 2.0**64  # products with scales beyond them could overflow


def layer_scales(spec: ModelSpec, found: Mapping[str, float], is_ignored: Callable[[str], bool]) -> dict[int, KVScales]:
    """Return the scales of keys and of values by layer. Latents use the first one, and need no second.

    Args:
        found: the number of each tensor, by its name.
        is_ignored: whether a tensor belongs to a part of the checkpoint that is not read.

    Raises CheckpointError for a name without a layer, a layer that keeps no keys and values, a scale that occurs twice
    with different numbers or lacks its other half, and one out of range.
    """
    by_layer: dict[int, dict[str, float]] = {}
    for name, scale in found.items():
        if is_ignored(name):
            continue
        layer = re.search(r"\.(\d+)\.", name)
        if layer is None:
            raise CheckpointError(f"{name} is a scale of a KV cache, but its name has no number of a layer")
        if not LEAST <= scale <= MOST:
            raise CheckpointError(f"{name} is {scale:g}; a scale of a KV cache must lie between 2^-64 and 2^64")
        own = by_layer.setdefault(int(layer[1]), {})
        for kind in next(kinds for suffix, kinds in SUFFIXES.items() if name.endswith(suffix)):
            if own.setdefault(kind, scale) != scale:
                raise CheckpointError(f"{name} is {scale:g}, but layer {layer[1]} has another scale, {own[kind]:g}")
    return {i: _both(spec, i, scales) for i, scales in sorted(by_layer.items())}


def _both(spec: ModelSpec, index: int, scales: Mapping[str, float]) -> KVScales:
    mixer = spec.layers[index].mixer if index < len(spec.layers) else None
    state = mixer.state() if mixer else None
    if state is None or state.snapshot or not state.elements:
        raise CheckpointError(
            f"the checkpoint has a scale of a KV cache for layer {index}, which keeps no keys and values"
        )
    needed = "k" if len(state.parts) == 1 else "kv"
    if missing := sorted(set(needed) - set(scales)):
        names = {"k": "keys", "v": "values"}
        raise CheckpointError(f"layer {index} has no scale of the KV cache for {names[missing[0]]}, but has the other")
    return scales["k"], scales.get("v", UNSCALED[1])


def describe_scales(scales: Mapping[int, KVScales], layers: int) -> str:
    """Return the ranges of scales by layer as text. layers: number of layers with keys and values."""
    if not scales:
        return "scale 1, because the checkpoint has no scales; magnitudes beyond 448 become 448"
    keys, values = zip(*scales.values(), strict=True)
    others = "; other layers have scale 1" if len(scales) < layers else ""
    ranges = f"keys {_range(keys)}, values {_range(values)}"
    return f"the checkpoint's scales for {len(scales)} of {layers} layers: {ranges}{others}"


def _range(scales: tuple[float, ...]) -> str:
    least, most = min(scales), max(scales)
    return f"{least:.3g}" if least == most else f"{least:.3g} to {most:.3g}"
