"""Prune a model to a given smaller one, with layers and heads that the caller names: how a recipe's draft begins.

The stream is rotated to its principal components, and neurons are kept by the product of their weights' norms. The
pruned model is worse than the large one, but it keeps structures that a small model needs long to learn, above all
heads that copy. Training then repairs it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ridgeline.compress.grid import Floats
from ridgeline.compress.prune.components import check_rotatable, components
from ridgeline.compress.prune.cut import Cut, CutWeights, LayerCut
from ridgeline.compress.prune.measure import stream_moment
from ridgeline.compress.prune.rank import best, product_of_norms
from ridgeline.errors import DataError, RequestError
from ridgeline.ops import OpsTable
from ridgeline.plan import rewrite
from ridgeline.spec import ModelSpec
from ridgeline.spec.axes import Unit
from ridgeline.train.data.batches import Batch
from ridgeline.train.pocket.recipe import KeptParts


def prune_to(
    large: ModelSpec, weights: Mapping[str, Any], small: ModelSpec, kept: KeptParts, batch: Batch, table: OpsTable
) -> dict[str, Floats]:
    """Return the weights of `small`, in float32 by the spec's names, computed from those of `large`. batch: some text.

    Raises DataError for a model whose parts are not known by name or whose stream cannot be rotated, and if the sizes
    of `small` do not match what is kept.
    """
    widen = table.memory.get
    try:
        check_rotatable(large)
        _check_names(large, weights, small, kept)
        cuts = tuple(_layer(large, i, kept.kv_heads) for i in kept.layers)
        spec = rewrite.with_layers(large, kept.layers)
        shallow = CutWeights(Cut(large, spec, tuple(LayerCut(i) for i in kept.layers)), weights, _wide(large), widen)
        moment = stream_moment(spec, shallow, batch.token_ids, batch.positions, batch.lengths, table)
        basis = components(spec, moment, min(small.hidden_size, large.hidden_size))
    except RequestError as e:
        raise DataError(str(e)) from None
    cut = Cut(large, small, cuts, components=basis)
    layers = tuple(
        _with_neurons(CutWeights(cut, weights, _wide(large), widen), new, layer)
        for new, layer in zip(small.layers, cuts, strict=False)
    )
    found = CutWeights(replace(cut, layers=layers), weights, _wide(large), widen)
    return {w.name: _fitting(found, w.name, w.shape) for w in small.weights()}


def _layer(spec: ModelSpec, index: int, kv_heads: Sequence[int]) -> LayerCut:
    own = spec.attention(index)
    if own is None or spec.layers[index].mlp is None:
        raise DataError(f"layer {index} cannot be pruned: attention and an MLP are needed")
    keys = np.array(_checked("KV heads", kv_heads, own.num_kv_heads), np.int64)
    queries = (keys[:, None] * own.query_group + np.arange(own.query_group)).reshape(-1)
    return LayerCut(index, {"keys": keys, "queries": queries})


def _with_neurons(weights: CutWeights, new: object, layer: LayerCut) -> LayerCut:
    """Return what a layer keeps, with the neurons of the largest product of norms, in the basis that is kept."""
    index = weights.cut.layers.index(layer)
    scores = product_of_norms(weights.cut.original.layers[layer.index], f"layers.{index}", weights.computed)
    size = getattr(getattr(new, "mlp", None), "intermediate_size", 0)
    unit: Unit = "mlp"
    return replace(layer, kept={**layer.kept, unit: best(scores, min(size, len(scores)))})


def _check_names(large: ModelSpec, weights: Mapping[str, Any], small: ModelSpec, kept: KeptParts) -> None:
    """Raise DataError unless the small model has the weights of the layers that are kept, whatever their sizes."""
    _checked("layers", kept.layers, len(large.layers))
    given: dict[str, str] = {w.name: w.name for w in large.weights() if not w.name.startswith("layers.")}
    for new, old in enumerate(kept.layers):
        prefix = f"layers.{old}."
        names = [w.name for w in large.weights() if w.name.startswith(prefix)]
        given |= {f"layers.{new}.{name.removeprefix(prefix)}": name for name in names}
    wanted = {w.name for w in small.weights()}
    if different := sorted(wanted ^ given.keys()):
        where = "the small model has" if different[0] in wanted else "the small model lacks"
        raise DataError(f"what is kept does not fit: {where} {different[0]}")
    if missing := sorted(name for name, old in given.items() if old not in weights):
        raise DataError(f"a model without {missing[0]} cannot be pruned")


def _fitting(weights: CutWeights, name: str, shape: tuple[int, ...]) -> Floats:
    found = np.ascontiguousarray(weights.computed(name))
    if found.shape != shape:
        raise DataError(f"what is kept does not fit: {name} is {found.shape}, but {shape} in the small model")
    return found


def _checked(what: str, kept: Sequence[int], count: int) -> Sequence[int]:
    if not all(0 <= i < count for i in kept):
        raise DataError(f"the {what} {', '.join(map(str, kept))} cannot be kept; the model has {count} {what}")
    return kept


def _wide(spec: ModelSpec) -> dict[str, Any]:
    return {w.name: "float32" for w in spec.weights()}
