"""Which axes of a layer's weights belong to which part: the table by which weights are cut.

An axis is a sequence of runs. A run has `many` units of one part, each of which is `block` neighboring rows; a run
without a part is kept whole. The axis of the hidden size is not in the table: it follows from `weights(width)` itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

from ridgeline.spec.attention import Attention, SharedAttention
from ridgeline.spec.latent import LatentAttention
from ridgeline.spec.mamba import Mamba, Mamba2
from ridgeline.spec.mlp import MLP, GatedMLP, MoE
from ridgeline.spec.model import AnyLayer

# Units that are kept or removed. "queries" are query heads, "keys" KV heads, "state" heads or channels of a state
# space, "neurons" the neurons of each expert, which keep other indices in each.
Unit = Literal["mlp", "shared", "experts", "neurons", "queries", "keys", "state"]


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
        **dict.fromkeys(("sinks", "gate_bias"), (_axis("queries", mixer.num_heads),)),
    }
    gate = _axis("queries", mixer.num_heads) if mixer.gate_over == "head" else query
    for name, axis in (("q", query), ("out_gate", gate), ("k", key), ("v", key)):
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
