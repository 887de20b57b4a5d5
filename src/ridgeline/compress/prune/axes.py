"""Say which axes of a layer's weights belong to which part: the table by which weights are cut.

An axis is a sequence of runs. A run has `many` units of one part, each of which is `block` neighboring rows; a run
without a part is kept whole. The axis of the hidden size is not in the table: it follows from `weights(width)` itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal, NamedTuple

import numpy as np

from ridgeline.errors import RequestError
from ridgeline.spec import (
    MLP,
    AnyLayer,
    Attention,
    GatedMLP,
    LatentAttention,
    Mamba,
    Mamba2,
    ModelSpec,
    MoE,
    SharedAttention,
)

# Units that are kept or removed. "queries" are query heads, "keys" KV heads, "state" heads or channels of a state
# space, "neurons" the neurons of each expert, which keep other indices in each.
Unit = Literal["mlp", "shared", "experts", "neurons", "queries", "keys", "state"]
Indices = np.ndarray[tuple[int, ...], np.dtype[np.int64]]
Kept = Mapping[Unit, Indices]


class Run(NamedTuple):
    """Neighboring rows of an axis: `many` units of `block` rows each. unit: None for rows that are always kept."""

    unit: Unit | None
    many: int
    block: int = 1


Axis = tuple[Run, ...]
Axes = Mapping[str, tuple[Axis | None, ...]]  # by the weight's name in its layer; None: an axis that is kept whole


def axes_of(layer: AnyLayer) -> dict[str, tuple[Axis | None, ...]]:
    """Return the axes of the weights of a layer that have units, by their names in the layer."""
    found = {f"mixer.{name}": axes for name, axes in _mixer(layer).items()}
    return found | {f"mlp.{name}": axes for name, axes in _mlp(layer).items()}


def unit_sizes(layer: AnyLayer) -> dict[Unit, int]:
    """Return the number of units of each kind in a layer."""
    return {run.unit: run.many for axes in axes_of(layer).values() for axis in axes for run in axis or () if run.unit}


def _mixer(layer: AnyLayer) -> Axes:
    mixer = layer.mixer.attention if isinstance(layer.mixer, SharedAttention) else layer.mixer
    match mixer:
        case Attention():
            return _attention(mixer)
        case LatentAttention():
            query, value = (_axis("queries", mixer.num_heads, n) for n in (mixer.qk_head_dim, mixer.v_head_dim))
            matrix = {"q.weight": (query,)} if mixer.q_lora_rank is None else {"q_b.weight": (query,)}
            return {**matrix, "kv_b.weight": (_axis("queries", mixer.num_heads),), "o.weight": (None, value)}
        case Mamba2():
            return _mamba2(mixer)
        case Mamba():
            own = _axis("state", mixer.inner_size)
            both = dict.fromkeys(("conv.weight", "conv.bias", "dt.weight", "dt.bias", "A_log", "D"), (own,))
            doubled = dict.fromkeys(("in.weight", "in.bias"), ((*own, *own),))
            return {**both, **doubled, "x.weight": (None, own), "out.weight": (None, own)}
    return {}


def _attention(mixer: Attention) -> Axes:
    query = _axis("queries", mixer.num_heads, mixer.head_dim)
    key = _axis("keys", mixer.num_kv_heads, mixer.head_dim)
    found: dict[str, tuple[Axis | None, ...]] = {
        "o.weight": (None, query),
        "sinks": (_axis("queries", mixer.num_heads),),
    }
    for name, axis in (("q", query), ("out_gate", query), ("k", key), ("v", key)):
        found[f"{name}.weight"] = found[f"{name}.bias"] = (axis,)
    if mixer.qk_norm_over == "all_heads":
        found |= {
            f"{name}_norm.{kind}": (axis,) for name, axis in (("q", query), ("k", key)) for kind in ("weight", "bias")
        }
    return found


def _mamba2(mixer: Mamba2) -> Axes:
    heads, wide = _axis("state", mixer.num_heads), _axis("state", mixer.num_heads, mixer.head_dim)
    groups = (Run(None, 2 * mixer.num_groups * mixer.state_size),)  # B and C, which the heads of a group share
    into, filtered = ((*wide, *wide, *groups, *heads),), ((*wide, *groups),)
    return {
        "in.weight": into, "in.bias": into, "conv.weight": filtered, "conv.bias": filtered, "dt_bias": (heads,),
        "A_log": (heads,), "D": (heads,), "gate_norm.weight": (wide,), "out.weight": (None, wide),
    }  # fmt: skip


def _mlp(layer: AnyLayer) -> Axes:
    mlp = layer.mlp
    match mlp:
        case GatedMLP() | MLP():
            return _dense(mlp, "mlp")
        case MoE():
            experts, own = _axis("experts", mlp.num_experts), _axis("neurons", mlp.intermediate_size)
            single = ("router.weight", "router.bias", "choice.bias", "experts.down.bias")
            found: dict[str, tuple[Axis | None, ...]] = dict.fromkeys(single, (experts,))
            for name in ("gate", "up"):
                found[f"experts.{name}.weight"] = found[f"experts.{name}.bias"] = (experts, own)
            found["experts.down.weight"] = (experts, None, own)
            shared = _dense(mlp.shared, "shared") if mlp.shared else {}
            return found | {f"shared.{name}": axes for name, axes in shared.items()}
    return {}


def _dense(mlp: GatedMLP | MLP, unit: Unit) -> Axes:
    own = _axis(unit, mlp.intermediate_size)
    rows = {f"{name}.{kind}": (own,) for name in ("gate", "up") for kind in ("weight", "bias")}
    return {**rows, "down.weight": (None, own)}


def _axis(unit: Unit, count: int, block: int = 1) -> Axis:
    return (Run(unit, count, block),)


def rows_of(axis: Axis, kept: Kept) -> Indices:
    """Return the indices of the rows of an axis that are kept."""
    found, start = [], 0
    for unit, count, block in axis:
        units = np.arange(count) if unit is None or unit not in kept else kept[unit]
        found.append((start + units[:, None] * block + np.arange(block)).reshape(-1))
        start += count * block
    return np.concatenate(found).astype(np.int64)


def width_axes(spec: ModelSpec) -> dict[str, int]:
    """Return the axis of the hidden size of each weight that has one, by the weight's full name.

    Raises RequestError for a weight with two such axes.
    """
    found: dict[str, int] = {"embed.weight": 1, "position_embed.weight": 1, "head.weight": 1}
    for name, shape, wider in _twice(spec):
        different = [axis for axis, (a, b) in enumerate(zip(shape, wider, strict=True)) if a != b]
        if len(different) > 1:
            raise RequestError(f"{name} has two axes of the hidden size, so that the width cannot be pruned")
        if different:
            found[name] = different[0]
    return found


def _twice(spec: ModelSpec) -> Iterator[tuple[str, tuple[int, ...], tuple[int, ...]]]:
    """Yield the shapes of all weights of norms and layers as they are, and with a hidden size that is larger by 1."""
    width = spec.hidden_size
    for a, b in zip(spec.norm.weights("norm", width), spec.norm.weights("norm", width + 1), strict=True):
        yield a.name, a.shape, b.shape
    for i, layer in enumerate(spec.layers):
        for a, b in zip(layer.weights(width), layer.weights(width + 1), strict=True):
            yield f"layers.{i}.{a.name}", a.shape, b.shape
