"""Latent attention in place of attention with KV heads: the spec, and the weights of each layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ridgeline.archs import OUR_MODEL_TYPE
from ridgeline.archs.write import config_of
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


class Form(NamedTuple):
    """How the norm of latents, which the original does not have, changes nothing.

    x / sqrt(mean(x^2) + eps) is x / sqrt(eps) for numbers x that are far below sqrt(eps). The numbers of a latent are
    about 1, times `down`. All factors are powers of two except for `up`, so that they change no bit but those of kv_b.

    norm: the norm. down: factor on the rows of kv_a. up: factor on kv_b. GAIN is the weight of the norm.
    """

    norm: RMSNorm
    down: float

    @property
    def up(self) -> float:
        return float(self.norm.eps**0.5 / (self.down * GAIN))


GAIN = 2.0**14
OWN = Form(RMSNorm(eps=2.0**28), 1.0)
DEEPSEEK = Form(RMSNorm(eps=1e-6), 2.0**-24)  # transformers and others have this epsilon there, whatever a config says


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
        form: how the norm of latents changes nothing.
    """

    def __init__(
        self, spec: ModelSpec, weights: Mapping[str, Any], types: Mapping[str, DType], widen: Callable[[Any], Floats],
        factor: Callable[[int], Factors | None], form: Form,
    ) -> None:  # fmt: skip
        super().__init__(spec, weights, types, widen)
        self._factor, self._form = factor, form
        self._latest: tuple[int, Factors | None] = -1, None

    def computed(self, name: str) -> Floats:
        layer, _, part = name.removeprefix("layers.").partition(".mixer.")
        factors = self._factors(int(layer)) if part else None
        if factors is None or part not in ("q.weight", "kv_a.weight", "kv_b.weight", "kv_a_norm.weight"):
            return super().computed(name)
        if part == "kv_a_norm.weight":
            return np.full(factors.kv_b.shape[-1], GAIN, np.float32)
        if part == "kv_a.weight":
            found = factors.kv_a.copy()
            found[: factors.kv_b.shape[-1]] *= self._form.down
        else:
            found = factors.q.reshape(-1, factors.q.shape[-1]) if part == "q.weight" else factors.kv_b * self._form.up
        return found.astype(np.float32)

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
    made, types = rewrite.with_latents(spec, latent, rotated, ropes, DEEPSEEK.norm), stored_types(original)
    fits = config_of(made)["model_type"] != OUR_MODEL_TYPE and "float16" not in types.values()
    form = DEEPSEEK if fits and options.format != "ridgeline" else OWN
    if form is OWN:
        made = rewrite.with_latents(spec, latent, rotated, ropes, OWN.norm)

    def factor(layer: int) -> Factors | None:
        if layer not in layers:
            return None
        one = layers[layer]
        return factored(one.own, one.moments, one.found, counts, latent, one.scale)

    return LatentWeights(made, original.model.weights, types, widen, factor, form), notes


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
