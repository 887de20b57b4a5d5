"""Prune a model: measure importance, choose what is kept, write it, and report the price."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from ridgeline.compress.data import Samples
from ridgeline.compress.deliver import Facts, OnProgress, deliver, samples_of, source_of
from ridgeline.compress.folder import open_original, stored_types, whole_folder
from ridgeline.compress.grid import Floats
from ridgeline.compress.price import PriceReport
from ridgeline.compress.prune.aims import Aims
from ridgeline.compress.prune.choose import choose, fit_params, kept_layers, sizes_by_layer
from ridgeline.compress.prune.components import check_rotatable, components, is_rotatable
from ridgeline.compress.prune.cut import Cut, CutWeights
from ridgeline.compress.prune.measure import Measured, Meter
from ridgeline.compress.prune.options import DEFAULTS, PruneOptions
from ridgeline.compress.prune.rank import beside_others, by_activation, by_chance, by_weights
from ridgeline.compress.prune.removal import losses_without
from ridgeline.compress.prune.residual import mixed_heads, norm_factors
from ridgeline.errors import RequestError
from ridgeline.nn import Model
from ridgeline.runtime.load import LoadedModel
from ridgeline.spec import ModelSpec
from ridgeline.spec.parts import PARTS, size_of


def prune(
    model: str, aims: Aims, *, out: str | Path, params: int | None = None, data: Sequence[str | Path] = (),
    options: PruneOptions = DEFAULTS, on_progress: OnProgress = lambda what, done, total: None,
) -> PriceReport:  # fmt: skip
    """Prune a model and write it to a new folder.

    Args:
        model: a folder or a hub id, which is not quantized.
        aims: the parts to keep; see `parse_keep`.
        out: the folder to write, which must not exist.
        params: the most parameters that the result may have. The sizes of MLPs and of the stream follow from it, unless
            `aims` gives them.
        data: text files or folders to measure importance with, and perplexity on a part that is held out.

    Raises:
        RidgelineError: with one line, for each input that cannot be used. Nothing is left on disk then.
    """
    options.check()
    if not aims.by_word and params is None:
        raise RequestError("nothing is to be pruned: say what to keep with --keep, or give --params")
    if not data and (options.importance == "activation" or options.channels == "components"):
        raise RequestError("importance by activation is measured on text: name some with --calibrate")
    with whole_folder(Path(out)) as folder:
        original = open_original(model, options.threads)
        samples = samples_of(original, data, options) if data else None
        source = "" if samples is None else source_of(samples, data)
        return write_pruned(model, original, aims, params, samples, source, folder, options, on_progress)


def write_pruned(
    name: str, original: LoadedModel, aims: Aims, params: int | None, samples: Samples | None, source: str,
    folder: Path, options: PruneOptions, on_progress: OnProgress = lambda what, done, total: None,
) -> PriceReport:  # fmt: skip
    """Prune a model that is open, write it to a folder that does not exist, read it back, and report the price.

    samples: sequences to measure on; None if importance needs none. source: where they come from.
    """
    cut = make_cut(original, aims, params, samples, options, on_progress)
    weights = CutWeights(cut, original.model.weights, stored_types(original), original.table.memory.get)
    title = f"{name} -> {changes(original.spec, cut)}"
    return deliver(folder, original, weights, Facts(title, "pruned", options.format), samples, source, on_progress)


def make_cut(
    original: LoadedModel, aims: Aims, params: int | None, samples: Samples | None, options: PruneOptions,
    on_progress: OnProgress = lambda what, done, total: None,
) -> Cut:  # fmt: skip
    """Measure importance, and return what is kept of the original."""
    spec, weights, widen = original.spec, original.model.weights, original.table.memory.get
    is_rotated = _is_rotated(spec, aims, params, samples, options)
    choose(spec, aims, by_chance(spec, 0))  # impossible sizes are known before anything is measured
    measured = measure(original, samples, is_rotated, on_progress) if samples else None
    if options.importance == "activation":
        assert measured is not None and samples is not None
        scores = by_activation(spec, measured)
        if "layers" in aims.by_word and options.layer_score == "perplexity":
            some = samples.calibration[: options.layer_sequences]
            scores = replace(scores, layers=losses_without(original, some, on_progress))
    else:
        by_norm = options.importance == "weights"
        scores = by_weights(spec, weights, widen) if by_norm else by_chance(spec, options.seed)
    kept = kept_layers(spec, aims, scores)
    if params is not None:
        aims = fit_params(spec, aims, kept, params)
    sizes = None
    if options.sizes == "by-layer":
        sizes = sizes_by_layer(spec, aims, kept, beside_others(scores))
    chosen = choose(spec, aims, scores, sizes)
    layers = tuple(
        replace(layer, mixed=mixed_heads(options.residual, layer.index, layer.kept, scores, measured))
        for layer in chosen.layers
    )
    if chosen.channels is None or measured is None:
        return Cut(spec, chosen.spec, layers, chosen.channels)
    if is_rotated:
        assert measured.moment is not None
        return Cut(spec, chosen.spec, layers, components=components(spec, measured.moment, chosen.spec.hidden_size))
    gains: dict[str, Floats] = {
        name: widen(weights[name]) for name in (*measured.squares, *measured.inputs) if name in weights
    }
    factors = norm_factors(spec, measured, gains, chosen.channels)
    return Cut(spec, chosen.spec, layers, chosen.channels, factors=factors)


def _is_rotated(
    spec: ModelSpec, aims: Aims, params: int | None, samples: Samples | None, options: PruneOptions
) -> bool:
    """Return whether the stream is rotated before it gets narrower. Raises RequestError where that is impossible."""
    if options.channels == "importance" or ("width" not in aims.by_word and params is None):
        return False
    if options.channels == "components":
        check_rotatable(spec)
        return True
    return samples is not None and options.importance == "activation" and is_rotatable(spec)


def measure(
    original: LoadedModel, samples: Samples, with_moment: bool, on_progress: OnProgress = lambda *_: None
) -> Measured:
    """Run the calibration sequences through the model, and return what its parts gave."""
    spec, total, done = original.spec, sum(map(len, samples.calibration)), 0
    meter = Meter(spec, original, with_moment=with_moment)
    model = Model(spec, original.model.weights, original.table, original.max_model_len, capture=meter.capture)
    for tokens in meter.run(model, original, samples.calibration):
        done += tokens
        on_progress("measuring importance", done, total)
    found = meter.measured()
    if not all(np.isfinite(score).all() for layer in found.units for score in layer.values()):
        raise RequestError("a layer gives NaN or infinity on the calibration text: the checkpoint is damaged")
    return found


def changes(before: ModelSpec, cut: Cut) -> str:
    """Return in words what is left: `2 of 4 layers, mlp 352 of 704, 61% of the parameters`."""
    after, words = cut.spec, []
    if len(after.layers) != len(before.layers):
        words.append(f"{len(after.layers)} of {len(before.layers)} layers")
    for part in PARTS:
        pairs = [
            (size_of(new, part), size_of(before.layers[own.index], part))
            for new, own in zip(after.layers, cut.layers, strict=True)
        ]
        if changed := [(new, old) for new, old in pairs if new != old]:
            new, old = (_range(sizes) for sizes in zip(*changed, strict=True))
            words.append(f"{part.replace('_', ' ')} {new} of {old}")
    if after.hidden_size != before.hidden_size:
        words.append(f"hidden size {after.hidden_size} of {before.hidden_size}")
    return ", ".join([*words, f"{after.num_params() / before.num_params():.0%} of the parameters"])


def _range(sizes: Sequence[int]) -> str:
    return str(sizes[0]) if len(set(sizes)) == 1 else f"{min(sizes)} to {max(sizes)}"
