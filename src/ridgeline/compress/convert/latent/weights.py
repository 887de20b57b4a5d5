"""Latent attention in place of attention with KV heads: the spec, and the weights of each layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ridgeline.compress.changed import SameWeights
from ridgeline.compress.compare import compare
from ridgeline.compress.convert.latent.choose import check_layers, check_sizes, chosen_counts, rope_of
from ridgeline.compress.convert.latent.factor import Components, Factors, components, factored
from ridgeline.compress.convert.latent.moments import (
    Matrices,
    Moments,
    matrices_of,
    moments_of_text,
    moments_of_weights,
)
from ridgeline.compress.convert.latent.norms import LinearWeights, linear_weights
from ridgeline.compress.convert.options import ConvertOptions
from ridgeline.compress.data import Samples
from ridgeline.compress.deliver import OnProgress
from ridgeline.compress.folder import changed_model, stored_types
from ridgeline.compress.grid import Floats
from ridgeline.plan import rewrite
from ridgeline.runtime.load import LoadedModel
from ridgeline.spec import ModelSpec, RMSNorm
from ridgeline.spec.dtype import DType

# x / sqrt(mean(x^2) + eps) is x / sqrt(eps) if eps is far larger than the numbers of x, which are about 1. The weight
# of such a norm is sqrt(eps), a power of two, so that the norm changes nothing.
LINEAR = RMSNorm(eps=2.0**28)
GAIN = 2.0**14


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer's matrices, its moments, and the components of its rotated keys."""

    own: Matrices
    moments: Moments
    found: Components
    scale: float


class LatentWeights(SameWeights):
    """The weights of a model with latent attention.

    Args:
        spec: the new model, with the layers of the original.
        factor: returns the matrices of a layer that became latent attention; None for another one.
    """

    def __init__(
        self, spec: ModelSpec, weights: Mapping[str, Any], types: Mapping[str, DType], widen: Callable[[Any], Floats],
        factor: Callable[[int], Factors | None],
    ) -> None:  # fmt: skip
        super().__init__(spec, weights, types, widen)
        self._factor = factor
        self._latest: tuple[int, Factors | None] = -1, None

    def computed(self, name: str) -> Floats:
        layer, _, part = name.removeprefix("layers.").partition(".mixer.")
        factors = self._factors(int(layer)) if part else None
        if factors is None or part not in ("q.weight", "kv_a.weight", "kv_b.weight", "kv_a_norm.weight"):
            return super().computed(name)
        if part == "kv_a_norm.weight":
            return np.full(factors.kv_b.shape[-1], GAIN, np.float32)
        found = {"q": factors.q.reshape(-1, factors.q.shape[-1]), "kv_a": factors.kv_a, "kv_b": factors.kv_b}
        return found[part.partition(".")[0]].astype(np.float32)

    def old_name(self, name: str) -> str:
        for part in (".kv_a.", ".kv_b.", ".kv_a_norm."):
            name = name.replace(f".mixer{part}", ".mixer.k.")
        return name

    def _factors(self, layer: int) -> Factors | None:
        if self._latest[0] != layer:
            self._latest = layer, self._factor(layer)
        return self._latest[1]


def latent_weights(
    original: LoadedModel, latent: int, rotated: int, samples: Samples | None, options: ConvertOptions,
    on_progress: OnProgress,
) -> tuple[LatentWeights, tuple[str, ...]]:  # fmt: skip
    """Return the model with latent attention, measured on a text where there is one, and remarks about what was lost on
    the way. Raises RequestError for a layer that cannot be converted, and for sizes that do not fit.
    """
    spec, to = original.spec, f"mla={latent}+{rotated}"
    attention = check_layers(spec, to)
    check_sizes(spec, attention, latent, rotated, to)
    notes: tuple[str, ...] = ()
    start = original
    if normed := {i: own for i, own in attention.items() if own.qk_norm is not None}:
        sequences = () if samples is None else samples.calibration
        linear = linear_weights(original, normed, lambda i: _gain(original, i), sequences, on_progress)
        start, notes = changed_model(original, linear), (_lost_norms(original, linear, samples),)
    weights, widen = start.model.weights, original.table.memory.get
    matrices = {
        i: matrices_of(own, weights, f"layers.{i}.mixer", widen, original.max_model_len) for i, own in attention.items()
    }
    if samples is None:
        moments = {i: moments_of_weights(own, _gain(original, i)) for i, own in matrices.items()}
    else:
        moments = moments_of_text(start, matrices, samples.calibration, on_progress)
    layers = {
        i: Layer(matrices[i], moments[i], components(matrices[i], moments[i], own.scale), own.scale)
        for i, own in attention.items()
    }
    counts = chosen_counts([one.found for one in layers.values()], rotated, options.rotate, to)
    ropes = [rope_of(own, counts, spec.max_position_embeddings) for own in attention.values()]
    made = rewrite.with_latents(spec, latent, rotated, ropes, LINEAR)

    def factor(layer: int) -> Factors | None:
        if layer not in layers:
            return None
        one = layers[layer]
        return factored(one.own, one.moments, one.found, counts, latent, one.scale)

    return LatentWeights(made, original.model.weights, stored_types(original), widen, factor), notes


def _lost_norms(original: LoadedModel, linear: LinearWeights, samples: Samples | None) -> str:
    """Return a remark that says what is lost if the norms of q and k become matrices, and nothing else changes."""
    if samples is None:
        return "norms of q and k became parts of their matrices, an approximation; --calibrate fits them to a text"
    found = compare(original, {"linear": changed_model(original, linear)}, samples.held_out)
    quality, before = found.others["linear"], found.original.perplexity.value
    assert quality.kl is not None
    return (
        "norms of q and k became parts of their matrices, fitted to the text; that alone costs a KL of "
        f"{quality.kl.value:.3g}, and perplexity {quality.perplexity.value:.4g} instead of {before:.4g}"
    )


def _gain(original: LoadedModel, layer: int) -> Any:
    """Return the weights of the norm before a mixer, which are the sizes of the numbers that it reads [width]."""
    name, norm = f"layers.{layer}.mixer_norm.weight", original.spec.layers[layer].pre_norm
    if name not in original.model.weights:
        return np.ones(original.spec.hidden_size)
    found = np.asarray(original.table.memory.get(original.model.weights[name]), np.float64)
    return np.abs(found + getattr(norm, "offset", 0.0))
