"""Choose which parts of a model are kept, from their scores and the sizes that are asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

import numpy as np

from ridgeline.compress.grid import Floats
from ridgeline.compress.prune.aims import Aims, Word, check_words
from ridgeline.compress.prune.axes import Indices
from ridgeline.compress.prune.cut import LayerCut
from ridgeline.compress.prune.rank import Scores, best, strongest
from ridgeline.errors import RequestError
from ridgeline.plan import rewrite
from ridgeline.spec import AnyLayer, ModelSpec
from ridgeline.spec.axes import Unit, unit_sizes
from ridgeline.spec.parts import Part, attention_of, groups_of, size_of, with_size

STEP = 8  # sizes that follow from a number of parameters are multiples of it where the full sizes are
SMALLEST, STEPS = 1 / 8, 1024  # the least share that a number of parameters may lead to, and shares that are tried
_FREE: tuple[Word, ...] = ("mlp", "width")  # what a number of parameters decides
# The parts of a layer to which a word applies, in the order in which they are cut.
PARTS: Mapping[Word, tuple[Part, ...]] = {
    "experts": ("experts",), "mlp": ("mlp", "shared"), "kv_heads": ("kv_heads",), "heads": ("heads",),
    "state": ("state",),
}  # fmt: skip
Sizes = Mapping[tuple[int, Part], int]  # sizes by layer and part, instead of those that the aims give


@dataclass(frozen=True, slots=True)
class Chosen:
    """The pruned model, and what each of its layers keeps of the original."""

    spec: ModelSpec
    layers: tuple[LayerCut, ...]
    channels: Indices | None


def choose(spec: ModelSpec, aims: Aims, scores: Scores, sizes: Sizes | None = None) -> Chosen:
    """Return what is kept. sizes: sizes that differ by layer. Raises RequestError for sizes that are impossible."""
    _check(spec, aims)
    kept = kept_layers(spec, aims, scores)
    layers, cuts = [], []
    for i in kept:
        layer, cut = _choose_in(spec, i, aims, scores.units[i], sizes or {})
        layers.append(layer)
        cuts.append(LayerCut(i, cut))
    width = aims.size("width", spec.hidden_size, "the hidden size")
    channels = None if width == spec.hidden_size else best(scores.channels, width)
    return Chosen(_joined(spec, kept, layers, width), tuple(cuts), channels)


def kept_layers(spec: ModelSpec, aims: Aims, scores: Scores) -> list[int]:
    """Return the indices of the layers that are kept, in order."""
    count = aims.size("layers", len(spec.layers), "the model's layers")
    return [int(i) for i in best(scores.layers, count)]


def uniform(spec: ModelSpec, aims: Aims, kept: Sequence[int]) -> ModelSpec:
    """Return the pruned model that aims describe, without choosing what is kept of a layer."""
    layers = []
    for i in kept:
        layer = spec.layers[i]
        for _, part, size in _resizes(spec, i, aims, {}):
            layer = with_size(layer, part, size)
        layers.append(layer)
    return _joined(spec, kept, layers, aims.size("width", spec.hidden_size, "the hidden size"))


def _joined(spec: ModelSpec, kept: Sequence[int], layers: Sequence[AnyLayer], width: int) -> ModelSpec:
    found = spec if len(kept) == len(spec.layers) else rewrite.with_layers(spec, kept)
    try:
        found = replace(found, layers=tuple(layers))
    except ValueError as e:
        raise RequestError(f"what is kept makes no model: {e}") from None
    return found if width == spec.hidden_size else rewrite.with_width(found, width)


def _check(spec: ModelSpec, aims: Aims) -> None:
    """Raise RequestError for words that say nothing about this model, or contradict each other."""
    check_words(aims, spec)
    for word in aims.by_word:
        if word in PARTS and not any(size_of(layer, p) for layer in spec.layers for p in PARTS[word]):
            kinds = {layer.mixer.kind for layer in spec.layers if layer.mixer}
            has = f"its mixers are {', '.join(sorted(kinds))}" if word != "experts" else "its MLPs have none"
            raise RequestError(f"--keep {word}: {spec.family} has no {word} whose parts are known by name; {has}")


def _resizes(spec: ModelSpec, i: int, aims: Aims, sizes: Sizes) -> list[tuple[Word, Part, int]]:
    """Return the parts of a layer whose sizes change, with their new sizes, in the order in which they are cut."""
    layer, found = spec.layers[i], list[tuple[Word, Part, int]]()
    for word, parts in PARTS.items():
        for part in parts:
            full = size_of(layer, part)
            if not full or (word not in aims.by_word and (i, part) not in sizes):
                continue
            if part == "heads" and (i, "kv_heads") in sizes and _is_mha(spec, i):
                continue  # they were cut with their keys and values
            size = sizes.get((i, part)) or aims.size(word, full, f"layer {i}", groups_of(layer, part))
            if size == full:
                continue
            try:
                layer = with_size(layer, part, size)
            except RequestError as e:
                raise RequestError(f"--keep {word}: layer {i} cannot have {size} of {full}: {e}") from None
            found.append((word, part, size))
    return found


def _choose_in(
    spec: ModelSpec, i: int, aims: Aims, scores: Mapping[Unit, Floats], sizes: Sizes
) -> tuple[AnyLayer, dict[Unit, Indices]]:
    """Return a layer with fewer units, and the indices of those that it keeps."""
    layer, kept = spec.layers[i], dict[Unit, Indices]()
    for _, part, size in _resizes(spec, i, aims, sizes):
        kept |= _units(layer, part, size, scores, kept)
        layer = with_size(layer, part, size)
    return layer, kept


def _units(
    layer: AnyLayer, part: Part, size: int, scores: Mapping[Unit, Floats], before: Mapping[Unit, Indices]
) -> dict[Unit, Indices]:
    """Return the indices of the units that are kept of a part. before: units that were chosen already."""
    own, sizes = attention_of(layer), unit_sizes(layer)
    if part == "mlp":
        unit: Unit = "neurons" if "neurons" in sizes else "mlp"
        return {unit: best(scores[unit], size)}
    if part in ("experts", "state"):
        return {part: best(scores[part], size, groups_of(layer, part))}
    if part == "shared":
        return {"shared": best(scores["shared"], size)}
    if own is None:
        return {"queries": best(scores["queries"], size)}
    group = own.query_group
    if part == "kv_heads" or group == 1:
        keys = best(scores["keys"], size)
        return {"keys": keys, "queries": (keys[:, None] * group + np.arange(group)).reshape(-1)}
    # Query heads of the KV heads that are kept: as many of each.
    left = before.get("queries", np.arange(own.num_heads))
    return {"queries": left[best(scores["queries"][left], size, own.num_kv_heads)]}


def fit_params(spec: ModelSpec, aims: Aims, kept: Sequence[int], target: int) -> Aims:
    """Return aims with the largest share of the MLPs' neurons and of the hidden size, the same for both unless one is
    given, with which the model has at most `target` parameters.

    Raises RequestError if nothing is left to choose, and if even the smallest share has more parameters.
    """
    free = [word for word in _FREE if word not in aims.by_word and _can_change(spec, kept, word)]
    if not free:
        raise RequestError("--params chooses the sizes of mlp and width, but --keep gives both: leave one of them out")

    def with_share(step: int) -> Aims:
        return Aims({**aims.by_word, **dict.fromkeys(free, step / STEPS)}, STEP)

    def params(step: int) -> int:
        return uniform(spec, with_share(step), kept).num_params()

    low, high = round(SMALLEST * STEPS), STEPS
    if (least := params(low)) > target:
        raise RequestError(
            f"--params {target:,}: with an eighth of {' and '.join(free)} the model still has {least:,}; keep fewer "
            "layers or heads with --keep, or ask for more"
        )
    while low < high:  # the largest step whose model is small enough
        middle = (low + high + 1) // 2
        low, high = (middle, high) if params(middle) <= target else (low, middle - 1)
    return with_share(low)


def _can_change(spec: ModelSpec, kept: Sequence[int], word: Word) -> bool:
    try:
        return uniform(spec, Aims({word: 0.5}, STEP), kept) != uniform(spec, Aims(), kept)
    except RequestError:
        return False


def sizes_by_layer(spec: ModelSpec, aims: Aims, kept: Sequence[int], worth: Scores) -> Sizes:
    """Return the sizes of MLPs and of KV heads by layer: as many units in all as with uniform sizes, and more where
    they are worth more. Each layer keeps at least one.

    worth: scores that can be compared between layers.
    """
    found: dict[tuple[int, Part], int] = {}
    for word, part, unit in (("mlp", "mlp", "mlp"), ("kv_heads", "kv_heads", "keys"), ("heads", "kv_heads", "keys")):
        if word not in aims.by_word:
            continue
        name = cast("Part", part)
        able = [i for i in kept if cast("Unit", unit) in worth.units[i] and (word != "heads" or _is_mha(spec, i))]
        if not able:
            continue
        total = sum(aims.size(cast("Word", word), size_of(spec.layers[i], name), f"layer {i}") for i in able)
        scores = [np.sort(worth.units[i][cast("Unit", unit)])[::-1] for i in able]
        owner = np.concatenate([np.full(len(s) - 1, n) for n, s in enumerate(scores)])
        rest = np.concatenate([s[1:] for s in scores])
        more = np.bincount(owner[strongest(rest)[: total - len(able)]], minlength=len(able))
        found |= {(i, name): 1 + int(n) for i, n in zip(able, more, strict=True)}
    return found


def _is_mha(spec: ModelSpec, index: int) -> bool:
    own = spec.attention(index)
    return own is not None and own.query_group == 1
