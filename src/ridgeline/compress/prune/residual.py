"""Add what removed query heads give to those that stay, and keep the scale of norms."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ridgeline.compress.grid import Floats
from ridgeline.compress.prune.axes import Indices
from ridgeline.compress.prune.cut import norm_offset
from ridgeline.compress.prune.measure import Measured
from ridgeline.compress.prune.options import Residual
from ridgeline.compress.prune.rank import Scores, strongest
from ridgeline.spec import ModelSpec, RMSNorm
from ridgeline.spec.axes import Unit
from ridgeline.spec.model import mlp_norm

SINGULAR = 1e-8  # heads that give the same as others to within this share take no part of a removed one


def mixed_heads(
    rule: Residual, index: int, kept: Mapping[Unit, Indices], scores: Scores, measured: Measured | None
) -> dict[str, Floats]:
    """Return the factors with which heads are added to those that are kept, by the matrices of a layer; see `LayerCut`.

    fit: the output matrix of a kept head gets that of each removed one, times the factor with which the kept heads
    together give the most of what the removed one gives. minitron: arXiv:2407.14679, section 3.2.
    """
    queries = kept.get("queries")
    if queries is None or rule == "none":
        return {}
    if rule == "minitron":
        own = scores.units[index]
        mixed = {f"mixer.{name}": _minitron(own["queries"], queries) for name in ("q.weight", "q.bias", "o.weight")}
        if len(own.get("keys", ())) == len(own["queries"]) and "keys" in kept:
            names = ("k.weight", "k.bias", "v.weight", "v.bias")
            mixed |= {f"mixer.{name}": _minitron(own["keys"], kept["keys"]) for name in names}
        return mixed
    if measured is None or index not in measured.products:
        return {}
    return {"mixer.o.weight": _fit(measured.products[index], queries)}


def _fit(products: Floats, kept: Indices) -> Floats:
    """Return [heads, kept heads]: 1 for a head itself, and for a removed one its factors by least squares."""
    found, removed = np.zeros((len(products), len(kept))), np.setdiff1d(np.arange(len(products)), kept)
    found[kept, np.arange(len(kept))] = 1.0
    among, with_removed = products[np.ix_(kept, kept)], products[np.ix_(kept, removed)]
    found[removed] = np.linalg.lstsq(among, with_removed, rcond=SINGULAR)[0].T
    return found


def _minitron(scores: Floats, kept: Indices) -> Floats:
    """Return [heads, kept heads]: head i of the ranking of L, of which K are kept, becomes 2 head_i - head_(2K - i + 1)
    for i from 2K - L + 1 to K, counted from 1.
    """
    # Heads that are kept come first, however groups changed the ranking.
    order = strongest(scores)
    order = np.concatenate([order[np.isin(order, kept)], order[~np.isin(order, kept)]])
    column = {int(head): j for j, head in enumerate(kept)}
    found, many, few = np.zeros((len(scores), len(kept))), len(scores), len(kept)
    for rank in range(1, few + 1):
        head, partner = int(order[rank - 1]), 2 * few - rank + 1
        has_partner = partner <= many
        found[head, column[head]] = 2.0 if has_partner else 1.0
        if has_partner:
            found[int(order[partner - 1]), column[head]] = -1.0
    return found


def norm_factors(
    spec: ModelSpec, measured: Measured, gains: Mapping[str, Floats], channels: Indices
) -> dict[str, float]:
    """Return the factor on the weights of each RMS norm with which the kept channels stay, on average, as large as they
    are beside all channels.

    gains: the weights of norms, by name. channels: indices of the channels that are kept.
    """
    found = {}
    for name, squares in measured.squares.items():
        if name not in gains or not _is_rms(spec, name):
            continue
        energy = squares / np.maximum(np.square(gains[name] + norm_offset(spec, name)), 1e-12)
        found[name] = _ratio(energy, channels)
    for name, energy in measured.inputs.items():
        if name in gains and _is_rms(spec, name):
            found[name] = _ratio(energy, channels)
    return found


def _ratio(energy: Floats, channels: Indices) -> float:
    return float(np.sqrt(energy[channels].mean() / max(float(energy.mean()), 1e-30)))


def _is_rms(spec: ModelSpec, name: str) -> bool:
    if name == "norm.weight":
        return isinstance(spec.norm, RMSNorm)
    layer = spec.layers[int(name.split(".")[1])]
    own = mlp_norm(layer) if ".mlp_norm." in name else layer.pre_norm
    norm = getattr(layer, "post_norm", None) if "_post_norm." in name else own
    return isinstance(norm, RMSNorm)
