"""Rank the parts of a model: by what they give, by the norms of their weights, or by chance."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ridgeline.compress.grid import Floats
from ridgeline.compress.prune.axes import Indices, width_axes
from ridgeline.compress.prune.measure import Measured
from ridgeline.spec import AnyLayer, ModelSpec
from ridgeline.spec.axes import Unit, axes_of, unit_sizes

Widen = Callable[[Any], Floats]


@dataclass(frozen=True, slots=True)
class Scores:
    """How much each part is worth, in any unit.

    units: scores by layer and kind; those of neurons of experts are [experts, neurons]. channels: scores of the
    stream's channels. layers: scores of whole layers.
    """

    units: tuple[Mapping[Unit, Floats], ...]
    channels: Floats
    layers: Floats


def by_activation(spec: ModelSpec, measured: Measured) -> Scores:
    """Return scores by what parts give. Heads give nothing of their own where a stronger head gives the same."""
    units = []
    for i, found in enumerate(measured.units):
        own = dict(found)
        if (products := measured.products.get(i)) is not None:
            own["queries"] = found["queries"] * distinct(found["queries"], products)
            if "keys" in found:
                groups = len(found["keys"])
                own["keys"] = found["keys"] * distinct(found["keys"], _grouped(products, groups))
        units.append(own)
    return Scores(tuple(units), measured.channels, measured.layers)


def distinct(norms: Floats, products: Floats) -> Floats:
    """Return for each head the sine of the smallest angle between what it gives and what a stronger head gives.

    It is 1 for the strongest head, and 0 for a copy of an earlier one.
    """
    order, found = strongest(norms), np.ones(len(norms))
    scale = np.sqrt(np.maximum(np.diag(products), 1e-300))
    cosines = products / scale / scale[:, None]
    for rank, head in enumerate(order):
        if rank and scale[head] > 1e-150:
            closest = float(np.abs(cosines[head, order[:rank]]).max())
            found[head] = np.sqrt(max(0.0, 1 - closest**2))
    return found


def _grouped(products: Floats, groups: int) -> Floats:
    """Return the products of what groups of heads give, [groups, groups], where the members are compared in order."""
    size = len(products) // groups
    parts = products.reshape(groups, size, groups, size)
    found: Floats = np.einsum("aibi->ab", parts)
    return found


def by_weights(spec: ModelSpec, weights: Mapping[str, Any], widen: Widen) -> Scores:
    """Return scores by norms: for a unit, the product of the norms of its parts of all matrices; for a channel, the
    norm of everything that reads or writes it; for a layer, the norm of its matrices.
    """
    wide, channels = width_axes(spec), np.zeros(spec.hidden_size)
    units: list[dict[Unit, Floats]] = [{} for _ in spec.layers]
    layers = np.zeros(len(spec.layers))
    for w in spec.weights():
        if not w.is_matrix:
            continue
        squares = np.square(widen(weights[w.name]).astype(np.float64))
        if (axis := wide.get(w.name)) is not None:
            channels += squares.sum(tuple(a for a in range(squares.ndim) if a != axis))
        if w.name.startswith("layers."):
            _, number, name = w.name.split(".", 2)
            layers[int(number)] += squares.sum()
            for unit, norms in _unit_norms(spec.layers[int(number)], name, squares).items():
                units[int(number)][unit] = units[int(number)].get(unit, 1.0) * norms
    for found in units:
        if "queries" in found and "keys" in found:  # a KV head goes with its query heads
            groups = len(found["keys"])
            found["keys"] = found["keys"] * np.linalg.norm(found["queries"].reshape(groups, -1), axis=1)
    return Scores(tuple(units), np.sqrt(channels), np.sqrt(layers))


def _unit_norms(layer: AnyLayer, name: str, squares: Floats) -> dict[Unit, Floats]:
    """Return the norm of each unit's part of one matrix, whose squares are given."""
    found: dict[Unit, Floats] = {}
    axes = axes_of(layer).get(name, ())
    for i, axis in enumerate(axes):
        if axis is None:
            continue
        if axis[0].unit == "neurons":  # of each expert
            others = tuple(a for a in range(1, squares.ndim) if a != i)
            found["neurons"] = np.sqrt(squares.sum(others))
            continue
        rows, start = squares.sum(tuple(a for a in range(squares.ndim) if a != i)), 0
        for unit, many, block in axis:
            part = rows[start : start + many * block].reshape(many, block).sum(1)
            start += many * block
            if unit is not None:
                found[unit] = np.sqrt(np.square(found.get(unit, 0.0)) + part)
    return found


def product_of_norms(layer: AnyLayer, prefix: str, read: Callable[[str], Floats]) -> Floats:
    """Return for each neuron of a layer's MLP the product of the norms of its parts of all matrices.

    read: returns a weight by its name, which begins with `prefix`.
    """
    found: Any = 1.0
    for name in ("mlp.gate.weight", "mlp.up.weight", "mlp.down.weight"):
        squares = np.square(read(f"{prefix}.{name}").astype(np.float64))
        found = found * _unit_norms(layer, name, squares)["mlp"]
    return np.asarray(found)


def by_chance(spec: ModelSpec, seed: int) -> Scores:
    """Return random scores."""
    rng = np.random.default_rng(seed)
    units: list[dict[Unit, Floats]] = []
    for layer in spec.layers:
        sizes = unit_sizes(layer)
        own: dict[Unit, Floats] = {unit: rng.random(n) for unit, n in sizes.items() if unit != "neurons"}
        if "neurons" in sizes:
            own["neurons"] = rng.random((sizes["experts"], sizes["neurons"]))
        units.append(own)
    return Scores(tuple(units), rng.random(spec.hidden_size), rng.random(len(spec.layers)))


def beside_others(scores: Scores) -> Scores:
    """Return scores that can be compared between layers: each over the mean of its kind in its layer.

    The layers' own sizes say little: with what a unit adds to the stream as its score, some layers would lose nearly
    all of it, and models were worse than with uniform sizes.
    """
    units = [{unit: own / max(float(own.mean()), 1e-30) for unit, own in found.items()} for found in scores.units]
    return Scores(tuple(units), scores.channels, scores.layers)


def strongest(scores: Floats) -> Indices:
    """Return indices in the order of falling scores; of equal ones the first comes first."""
    found: Indices = np.argsort(-scores, axis=-1, kind="stable")
    return found


def best(scores: Floats, size: int, groups: int = 1) -> Indices:
    """Return the indices of the `size` best units in order; with groups, of as many in each group of neighbors.

    scores: [..., units]; each row is ranked alone.
    """
    parts = scores.reshape(*scores.shape[:-1], groups, -1)
    chosen = np.sort(strongest(parts)[..., : size // groups], axis=-1)
    offsets = np.arange(groups)[:, None] * parts.shape[-1]
    found: Indices = (chosen + offsets).reshape(*scores.shape[:-1], size).astype(np.int64)
    return found
