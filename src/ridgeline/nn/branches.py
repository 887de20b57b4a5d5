"""Build the channel mixer of a layer: its branch, and a branch beside it that joins the stream one layer later."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from ridgeline.ops import OpsTable, api
from ridgeline.ops.api import Array, Weights
from ridgeline.ops.stages import MLPBlock
from ridgeline.spec import Norm, ShortcutMLP

Branch = Callable[[Array, Array | None], tuple[Array, Array]]  # (residual, delta or None) -> residual, delta


def build_mlp(case: MLPBlock, weights: Weights, table: OpsTable) -> tuple[Branch, Branch | None]:
    """Return MLP_BLOCK, and a second one of the same residual for experts that are a shortcut; None without them."""
    if not isinstance(case.mlp, ShortcutMLP):
        return table.stage(api.MLP_BLOCK, case, weights), None
    norm = {name: array for name, array in weights.arrays.items() if name.startswith("norm.")}
    under = weights.under("dense.")
    dense = under._replace(arrays={**under.arrays, **norm})
    others = {name: linear for name, linear in weights.linears.items() if not name.startswith("dense.")}
    moe = weights._replace(linears=others)
    return (
        table.stage(api.MLP_BLOCK, replace(case, mlp=case.mlp.dense), dense),
        table.stage(api.MLP_BLOCK, replace(case, mlp=case.mlp.moe), moe),
    )


class OuterNorm:
    """A norm outside of the stages: after a branch, or of the stream itself. It does nothing where a layer has none."""

    def __init__(self, norm: Norm | None, name: str, weights: Mapping[str, Array], table: OpsTable) -> None:
        self._kernel = table.primitive(api.NORM, norm) if norm else None
        self._weight, self._bias = weights.get(f"{name}.weight"), weights.get(f"{name}.bias")

    def __call__(self, x: Array) -> Array:
        return x if self._kernel is None or self._weight is None else self._kernel(x, self._weight, self._bias)
