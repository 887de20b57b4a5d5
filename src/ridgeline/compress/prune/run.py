"""Prune a model: measure importance, choose what is kept, write it, and report the price."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from ridgeline.compress.compare import Comparison, compare
from ridgeline.compress.data import NAMED, Samples, read_samples
from ridgeline.compress.grid import Floats
from ridgeline.compress.prune.aims import Aims
from ridgeline.compress.prune.choose import choose, fit_params, kept_layers, sizes_by_layer
from ridgeline.compress.prune.components import check_rotatable, components, is_rotatable
from ridgeline.compress.prune.cut import Cut, CutWeights
from ridgeline.compress.prune.measure import Measured, Meter
from ridgeline.compress.prune.options import DEFAULTS, PruneOptions
from ridgeline.compress.prune.price import FILE, PriceReport, machine_note, price
from ridgeline.compress.prune.rank import beside_others, by_activation, by_chance, by_weights
from ridgeline.compress.prune.removal import losses_without
from ridgeline.compress.prune.residual import mixed_heads, norm_factors
from ridgeline.compress.prune.write import (
    config_for,
    pruned_model,
    read_back,
    stored_types,
    whole_folder,
    write_folder,
)
from ridgeline.compress.write import write_json
from ridgeline.errors import RequestError
from ridgeline.load.tokenizer import Tokenizer
from ridgeline.nn import Model
from ridgeline.plan import rewrite
from ridgeline.runtime.load import LoadedModel, LoadOptions, pass_model
from ridgeline.spec import ModelSpec

OnProgress = Callable[[str, int, int], None]  # called with what is done, the finished amount and the whole amount


def prune(
    model: str, aims: Aims, *, out: str | Path, params: int | None = None, data: Sequence[str | Path] = (),
    options: PruneOptions = DEFAULTS, on_progress: OnProgress = lambda what, done, total: None,
) -> PriceReport:  # fmt: skip
    """Prune a model and write it to a new folder.

    Args:
        model: a folder or a hub id, which is not quantized.
        aims: what to keep; see `parse_keep`.
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
        original = open_original(model, options)
        samples = _samples(original, data, options) if data else None
        source = "" if samples is None else _source(samples, data)
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
    config, names, note = config_for(original, weights, options.format)
    on_progress("writing", 0, 1)
    write_folder(folder, original, weights, config, names)
    pruned = pruned_model(original, weights)
    off = read_back(folder, pruned, _some_ids(original, samples))
    comparison = None if samples is None else _compared(original, pruned, samples, on_progress)
    prices = {"original": price(original, original.spec), "pruned": price(original, cut.spec)}
    notes = (*(() if samples is None else samples.notes), *((note,) if note else ()))
    report = PriceReport(
        f"{name} -> {changes(original.spec, cut)}", prices, comparison, off, tuple(c.index for c in cut.layers), source,
        machine_note(), notes,
    )  # fmt: skip
    write_json(folder / FILE, report.to_json())
    return report


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


def open_original(model: str, options: PruneOptions) -> LoadedModel:
    """Open a model that is not quantized, of which no layer stays in memory."""
    original = pass_model(model, LoadOptions(device="cpu", threads=options.threads))
    checkpoint = original.checkpoint
    if checkpoint.gguf is not None:
        raise RequestError(f"{model} is a GGUF file; name the checkpoint from which it was made")
    if checkpoint.config.get("quantization_config") or original.model.formats.by_name:
        raise RequestError(f"{model} is quantized; name the checkpoint from which it was made")
    return original


def _samples(original: LoadedModel, data: Sequence[str | Path], options: PruneOptions) -> Samples:
    longest = original.max_model_len
    length = options.length if options.length is not None else min(512, longest)
    if not 2 <= length <= longest:
        raise RequestError(f"length (--sequence-length) is {length}; it must be from 2 to {longest} tokens")
    return read_samples(
        data, Tokenizer.from_folder(original.checkpoint.folder), length=length, count=options.sequences,
        held_out_tokens=options.held_out_tokens, seed=options.seed,
    )  # fmt: skip


def _some_ids(original: LoadedModel, samples: Samples | None) -> list[int]:
    if samples is not None:
        return list(samples.held_out[0].token_ids)
    count = min(64, original.max_model_len)
    found: list[int] = np.random.default_rng(0).integers(0, original.spec.vocab_size, count).tolist()
    return found


def _compared(
    original: LoadedModel, pruned: LoadedModel, samples: Samples, on_progress: OnProgress
) -> Comparison:  # fmt: skip
    total, done = sum(d.num_scored for d in samples.held_out), 0

    def on_tokens(scored: int) -> None:
        nonlocal done
        done += scored
        on_progress("measuring on the held-out part", done, total)

    return compare(original, {"pruned": pruned}, samples.held_out, on_tokens)


def _source(samples: Samples, data: Sequence[str | Path]) -> str:
    more = f" and {len(data) - NAMED} more" if len(data) > NAMED else ""
    return f"{len(samples.calibration)} sequences of {', '.join(map(str, data[:NAMED]))}{more}"


def changes(before: ModelSpec, cut: Cut) -> str:
    """Return in words what is left: `2 of 4 layers, mlp 352 of 704, 61% of the parameters`."""
    after, words = cut.spec, []
    if len(after.layers) != len(before.layers):
        words.append(f"{len(after.layers)} of {len(before.layers)} layers")
    for part in rewrite.PARTS:
        pairs = [
            (rewrite.size_of(new, part), rewrite.size_of(before.layers[own.index], part))
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
