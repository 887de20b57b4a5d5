"""Collect the weights of the stages of a layer: matrices that are stored in a format, and all other arrays."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from ridgeline.nn.adapters import AdapterSlots
from ridgeline.nn.capture import EXPERTS, INPUT, Capture
from ridgeline.nn.group import Ranks
from ridgeline.nn.terms import Terms, stored_term
from ridgeline.ops import OpsTable
from ridgeline.ops.api import Array, Linear, Weights
from ridgeline.quant import store
from ridgeline.spec import ModelSpec, Weight
from ridgeline.spec.quant import AS_STORED, FormatTable
from ridgeline.spec.storage import KVScales


class How(NamedTuple):
    """How the matrices of a model are built."""

    table: OpsTable
    formats: FormatTable
    low_rank: Mapping[str, Terms]
    capture: Capture | None
    kv_scales: Mapping[int, KVScales] = MappingProxyType({})
    ranks: Ranks | None = None
    adapters: AdapterSlots | None = None

    def total(self, delta: Array) -> Array:
        """Return the delta of a branch from this rank's part of it."""
        return delta if self.ranks is None else self.ranks.total(delta)


def bind(
    weights: Mapping[str, Array], table: OpsTable, prefix: str, norm: str, formats: FormatTable = AS_STORED,
    low_rank: Mapping[str, Terms] = MappingProxyType({}), capture: Capture | None = None,
    adapters: AdapterSlots | None = None,
) -> Weights:  # fmt: skip
    """Collect the weights of one stage: matrices under `prefix` as Linear, everything else as arrays.

    Matrices are stored as `formats` says. The weights of the stage's norm are named "norm".
    low_rank, capture, adapters: see `Model`.
    """

    def watched(linear: Linear, name: str) -> Linear:
        return linear if capture is None else capture.watched(linear, f"{prefix}.{name}{INPUT}")

    linears: dict[str, Linear] = {}
    experts: dict[str, list[Linear]] = {}
    arrays: dict[str, Array] = {}
    for name, array in weights.items():
        if name.startswith(f"{norm}."):
            arrays[f"norm.{name.removeprefix(f'{norm}.')}"] = array
        elif name.startswith(f"{prefix}."):
            module, _, kind = name.removeprefix(f"{prefix}.").rpartition(".")
            bias = weights.get(f"{prefix}.{module}.bias")
            own = formats.of(Weight(name, array.shape))
            if kind == "weight" and len(array.shape) == 2:
                linear = store(array, bias, table, own, stored_term(low_rank.get(name), table))
                own_terms = linear if adapters is None else adapters.around(name, linear)
                linears[module] = watched(own_terms, module)
            elif kind == "weight" and module.startswith("experts."):
                stack: Any = array, bias
                kind = module.removeprefix("experts.")
                experts[kind] = [
                    watched(
                        store(stack[0][e], None if bias is None else stack[1][e], table, own), f"{EXPERTS}.{e}.{kind}"
                    )
                    for e in range(array.shape[0])
                ]
            else:
                arrays[f"{module}.{kind}" if module else kind] = array
    return Weights(linears, arrays, experts)


def bound(weights: Mapping[str, Array], prefix: str, how: How, norm: str | None = None) -> Weights:
    """Return the weights of the stage under `prefix`. norm: its norm's name; None: the prefix, and `_norm`."""
    return bind(
        weights, how.table, prefix, norm or f"{prefix}_norm", how.formats, how.low_rank, how.capture, how.adapters
    )


def mixer_norm(spec: ModelSpec, index: int) -> str:
    """Return the name of the norm before the mixer of a layer: its own, or that of the layer beside which it runs."""
    return f"layers.{index - spec.is_beside(index)}.mixer_norm"


def mixer_weights(spec: ModelSpec, index: int, weights: Mapping[str, Array], how: How) -> Weights:
    """Return the weights of a layer's mixer; matrices within it that ranks divide along their inputs are summed."""
    layer, found = spec.layers[index], bound(weights, f"layers.{index}.mixer", how, mixer_norm(spec, index))
    if how.ranks is None or layer.mixer is None:
        return found
    inner = {n: how.ranks.summed(found.linears[n]) for n in layer.mixer.summed_within}
    return found._replace(linears={**found.linears, **inner})
