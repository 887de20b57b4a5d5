"""Read a table of names from JSON: the names of a checkpoint whose architecture a user describes.

The words are those of `archs/names.py`. `table_to_json` writes a family's own table as an example to start from.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import translate
from typing import Any

from ridgeline.archs.names import (
    LLAMA,
    AllExperts,
    Before,
    Each,
    Elsewhere,
    ExpertPart,
    ExpertRows,
    FusedRows,
    GroupPart,
    Groups,
    HeadPart,
    Names,
    Read,
    Source,
    Tensor,
)
from ridgeline.errors import ConfigError
from ridgeline.spec import Attention, GatedDelta, ModelSpec
from ridgeline.spec.codec import part_from_json, part_to_json

AT = "names"
MAX_NAME = 400  # characters of a name of a tensor
MAX_AXES = 4  # axes of size 1 before or after a weight's own
_FIELDS = ("root", "layer", "parts", "some_layers", "transposed", "ignore", "optional_prefix", "sublayers")
_LAYER_FIELDS = ("layers", "layer", "parts")
# Which number a name may contain in braces, by the field that holds it.
_LAYER, _EXPERT, _NONE = ("{i}",), ("{e}",), ()
_SUBLAYER = "{s}"  # any part of a layer may have it; see Names.sublayers


@dataclass(frozen=True, slots=True)
class LayerNames:
    """Names of some layers, where they differ from those of the others. layer: None for the common prefix."""

    layers: frozenset[int]
    layer: str | None
    parts: Mapping[str, Source]


@dataclass(frozen=True, slots=True)
class Table(Names):
    """Names from JSON. Every weight must have one, and every name a weight: nothing is guessed.

    some_layers: names of layers that differ; the first entry with a layer counts.
    """

    some_layers: tuple[LayerNames, ...] = ()

    @property
    def described(self) -> bool:
        return True

    def fitting(self, spec: ModelSpec, keys: object) -> Names:
        return self

    def of_layer(self, index: int) -> Names:
        """Return the names of one layer."""
        for own in self.some_layers:
            if index in own.layers:
                layer = self.layer if own.layer is None else own.layer
                return Names(self.root, layer, {**self.parts, **own.parts}, self.transposed, sublayers=self.sublayers)
        return Names(self.root, self.layer, self.parts, self.transposed, sublayers=self.sublayers)

    def reads(self, spec: ModelSpec) -> dict[str, Read]:
        """Return how to read every weight. Raises ConfigError for a table that does not fit the spec."""
        shapes = {w.name: w.shape for w in spec.weights()}
        by_layer = [self.of_layer(i) for i in range(len(spec.layers))]
        out: dict[str, Read] = {}
        for name in shapes:
            index = _layer_of(name)
            names = self.of_layer(0) if index is None else by_layer[index]
            _check_source(name, names, shapes, spec)
            out[name] = names._read(name, shapes, spec)
        return out


def table_from_json(value: Any) -> Table:
    """Read a table. Raises ConfigError, which names the field, for anything unknown, missing, mistyped or too long."""
    if not isinstance(value, dict):
        raise ConfigError(f"{AT} is {value!r:.100}; it must be an object with {', '.join(_FIELDS)}")
    _check_fields(value, _FIELDS, AT)
    root = _sources(value.get("root", {}), f"{AT}.root")
    prefix = value.get("layer", "")
    if "layer" in value:
        _check_name(prefix, f"{AT}.layer", _LAYER)
    elif value.get("parts"):
        raise ConfigError(f'{AT}.layer is missing; give the prefix of a layer, such as "model.layers.{{i}}."')
    some = value.get("some_layers", [])
    if not isinstance(some, list):
        raise ConfigError(f"{AT}.some_layers is {some!r:.100}; it must be a list of objects")
    sublayers = value.get("sublayers", 1)
    if type(sublayers) is not int or sublayers < 1:
        raise ConfigError(f"{AT}.sublayers is {sublayers!r:.100}; it must be a whole number of at least 1")
    return Table(
        root, prefix, _sources(value.get("parts", {}), f"{AT}.parts"),
        transposed=frozenset(_texts(value, "transposed")),
        ignore=(*LLAMA.ignore, *(f"^{translate(p)}" for p in _texts(value, "ignore"))),
        optional_prefix=_check_name(value.get("optional_prefix", ""), f"{AT}.optional_prefix", _NONE),
        some_layers=tuple(_layer_names(entry, f"{AT}.some_layers[{i}]") for i, entry in enumerate(some)),
        sublayers=sublayers,
    )  # fmt: skip


def check_table(table: Table, spec: ModelSpec) -> None:
    """Raise ConfigError unless each weight has a name of its own, and each entry of the table a weight."""
    reads = table.reads(spec)
    taken: dict[tuple[object, ...], str] = {}
    for name, read in reads.items():
        index = _layer_of(name)
        names = table.of_layer(index or 0)
        if isinstance(_source(name, names), Elsewhere):
            continue  # a block that layers share may be read by each of them
        own = (read.keys, read.rows, read.head_part, read.every, read.group_rows, read.expert_rows)
        if (other := taken.setdefault(own, name)) != name:
            raise ConfigError(f"{AT}: {read.keys[0]} is given to both {other} and {name}; give each its own tensor")
    _check_used(table, spec, list(reads))


def table_to_json(names: Names, spec: ModelSpec) -> dict[str, Any]:
    """Return a family's names of the weights of a spec as a table.

    It leaves out the tensors that the family ignores, and other layouts of its files.
    """
    root: dict[str, Source] = {}
    parts: dict[str, Source] = {}
    for name in (w.name for w in spec.weights()):
        module = name.rpartition(".")[0]
        if (index := _layer_of(name)) is None:
            root[module] = names.root[module]
            continue
        own = name.removeprefix(f"layers.{index}.")
        key = own if own in names.parts else own.rpartition(".")[0]
        parts[key] = names.parts[key]
    out: dict[str, Any] = {
        "root": {ours: part_to_json(source) for ours, source in root.items()}, "layer": names.layer,
        "parts": {ours: part_to_json(source) for ours, source in parts.items()},
    }  # fmt: skip
    modules = {_module_of(source) for source in (*root.values(), *parts.values())}
    if transposed := sorted(names.transposed & modules):
        out["transposed"] = transposed
    if names.optional_prefix:
        out["optional_prefix"] = names.optional_prefix
    if names.sublayers > 1:
        out["sublayers"] = names.sublayers
    return out


# Reading ----------------------------------------------------------------------------------------------


def _check_fields(value: Mapping[str, Any], known: tuple[str, ...], at: str) -> None:
    if unknown := sorted(set(value) - set(known)):
        raise ConfigError(f"{at} has the unknown field {unknown[0]!r:.100}; it may have {', '.join(known)}")


def _texts(value: Mapping[str, Any], name: str) -> list[str]:
    texts = value.get(name, [])
    if not isinstance(texts, list) or not all(isinstance(text, str) and len(text) <= MAX_NAME for text in texts):
        raise ConfigError(f"{AT}.{name} is {texts!r:.100}; it must be a list of texts of at most {MAX_NAME} characters")
    return texts


def _sources(value: Any, at: str) -> dict[str, Source]:
    if not isinstance(value, dict):
        raise ConfigError(f"{at} is {value!r:.100}; it must be an object from our names to the checkpoint's")
    found: dict[str, Source] = {}
    for ours, given in value.items():
        where = f"{at}.{ours:.100}"
        found[ours] = part_from_json(given, Source, where)
        _check_words(found[ours], where)
    return found


def _check_words(source: Source, at: str) -> None:
    """Raise ConfigError for a name, an index or a count that has no meaning."""
    if isinstance(source, str):
        _check_name(source, at, _NONE)
        return
    if isinstance(source, Tensor | Elsewhere | ExpertRows):
        _check_name(source.name, f"{at}.name", _LAYER if isinstance(source, Elsewhere) else _NONE, needed=False)
    else:
        _check_name(source.module, f"{at}.module", _EXPERT if isinstance(source, Each) else _NONE)
    if isinstance(source, Before):
        _check_name(source.first, f"{at}.first", _NONE)
    if isinstance(source, Tensor) and not all(0 <= axes <= MAX_AXES for axes in source.axes):
        raise ConfigError(f"{at}.axes is {list(source.axes)}; each number must be from 0 to {MAX_AXES}")
    if isinstance(source, HeadPart | AllExperts) and not 0 <= source.index < source.count:
        raise ConfigError(f"{at}: index {source.index} must be at least 0 and less than count {source.count}")
    if isinstance(source, Groups) and source.count is not None and source.count < 1:
        raise ConfigError(f"{at}.count is {source.count}; it must be at least 1, or null for the heads of keys")


def _check_name(name: Any, at: str, numbers: tuple[str, ...], needed: bool = True) -> str:
    """Return a name of a tensor, or a part of one. numbers: texts in braces that it may have, and must if `needed`."""
    if not isinstance(name, str) or len(name) > MAX_NAME:
        raise ConfigError(f"{at} is {name!r:.100}; it must be a text of at most {MAX_NAME} characters")
    rest = name.replace(_SUBLAYER, "") if ".parts" in at else name
    for number in numbers:
        if needed and number not in name:
            raise ConfigError(f"{at} is {name!r:.100}; it must contain {number}, which stands for a number")
        rest = rest.replace(number, "")
    if "{" in rest or "}" in rest:
        allowed = f"only {numbers[0]} may be in braces" if numbers else "braces are not allowed here"
        raise ConfigError(f"{at} is {name!r:.100}; {allowed}")
    return name


def _layer_names(entry: Any, at: str) -> LayerNames:
    if not isinstance(entry, dict):
        raise ConfigError(f"{at} is {entry!r:.100}; it must be an object with {', '.join(_LAYER_FIELDS)}")
    _check_fields(entry, _LAYER_FIELDS, at)
    layers = entry.get("layers")
    if not isinstance(layers, list) or not layers or not all(type(i) is int and i >= 0 for i in layers):
        raise ConfigError(f"{at}.layers is {layers!r:.100}; it must be a list of numbers of layers, from 0 on")
    prefix = entry.get("layer")
    if prefix is not None:
        _check_name(prefix, f"{at}.layer", _LAYER)
    return LayerNames(frozenset(layers), prefix, _sources(entry.get("parts", {}), f"{at}.parts"))


# Checking against a spec ------------------------------------------------------------------------------


def _layer_of(name: str) -> int | None:
    """Return the number of the layer that has a weight; None outside the layers."""
    match = re.match(r"layers\.(\d+)\.", name)
    return int(match[1]) if match else None


def _source(name: str, names: Names) -> Source | None:
    """Return the entry of a weight, as `Names` finds it."""
    module, _, suffix = name.rpartition(".")
    if (index := _layer_of(name)) is None:
        return names.root.get(module)
    own = module.removeprefix(f"layers.{index}.")
    return names.parts.get(f"{own}.{suffix}", names.parts.get(own))


def _check_source(name: str, names: Names, shapes: Mapping[str, tuple[int, ...]], spec: ModelSpec) -> None:
    """Raise ConfigError for a weight without an entry, and for an entry that does not fit it."""
    index, source = _layer_of(name), _source(name, names)
    module, _, suffix = name.rpartition(".")
    prefix = "" if index is None else f"layers.{index}."
    own, field = module.removeprefix(prefix), f"{AT}.{'root' if index is None else 'parts'}"
    if source is None:
        raise ConfigError(f"{field} has no name for {name} of shape {list(shapes[name])}; add {own!r} to {field}")

    def refused(why: str) -> ConfigError:
        return ConfigError(f"{field}.{own}: {type(source).__name__} of {name}: {why}")

    if isinstance(source, FusedRows | GroupPart | Groups | ExpertPart):
        if own not in source.names:
            raise refused(f"names must contain {own!r} itself, in the order of the rows")
        if lacking := [n for n in source.names if f"{prefix}{n}.{suffix}" not in shapes]:
            raise refused(f"the spec has no weight {prefix}{lacking[0]:.100}.{suffix}; correct names")
    mixer = spec.layers[index].mixer if index is not None and own.startswith("mixer.") else None
    whole = isinstance(mixer, Attention) and shapes[name][0] % mixer.head_dim == 0
    if isinstance(source, HeadPart) and not whole:
        raise refused("only attention has heads with parts")
    if isinstance(source, GroupPart | Groups):
        _check_groups(source, mixer, [shapes[f"{prefix}{n}.{suffix}"][0] for n in source.names], refused)
    if isinstance(source, AllExperts | ExpertPart | ExpertRows | Each):
        least = 2 if suffix == "bias" or isinstance(source, Each) else 3
        if len(shapes[name]) < least:
            raise refused(f"the weight has shape {list(shapes[name])}, which has no axis of experts")


def _check_groups(source: GroupPart | Groups, mixer: object, rows: list[int], refused: Any) -> None:
    count = source.count if isinstance(source, Groups) else None
    if count is None:
        if not isinstance(mixer, GatedDelta | Attention):
            raise refused("only attention and delta layers have groups of heads; give a count with Groups")
        count = mixer.num_key_heads if isinstance(mixer, GatedDelta) else mixer.num_kv_heads
    if odd := [number for number in rows if number % count]:
        raise refused(f"{odd[0]} rows cannot be cut into {count} equal groups")


def _check_used(table: Table, spec: ModelSpec, weights: list[str]) -> None:
    """Raise ConfigError, with the nearest name, for an entry that no weight has."""
    parts: dict[int, set[str]] = {}
    root: set[str] = set()
    for name in weights:
        module = name.rpartition(".")[0]
        if (index := _layer_of(name)) is None:
            root.add(module)
        else:
            prefix = f"layers.{index}."
            parts.setdefault(index, set()).update({module.removeprefix(prefix), name.removeprefix(prefix)})
    if spec.tie_word_embeddings:
        root.add("head")  # files of a tied model may have the matrix, which must then equal the embedding
    everywhere = set[str]().union(*parts.values())
    _check_entries(table.root, root, f"{AT}.root")
    _check_entries(table.parts, everywhere, f"{AT}.parts")
    for i, own in enumerate(table.some_layers):
        at = f"{AT}.some_layers[{i}]"
        if (last := max(own.layers)) >= len(spec.layers):
            raise ConfigError(f"{at}.layers: {last} is no layer; the spec has {len(spec.layers)}, from 0 on")
        for index in own.layers:
            if not parts.get(index, set()) & own.parts.keys() and own.layer is None:
                raise ConfigError(f"{at} changes nothing in layer {index}; leave the layer out, or correct parts")
        _check_entries(own.parts, set[str]().union(*(parts.get(i, set()) for i in own.layers)), f"{at}.parts")
    modules = {module for source in _all_sources(table) if (module := _module_of(source))}
    if unused := sorted(table.transposed - modules):
        raise ConfigError(f"{AT}.transposed: no entry reads {unused[0]!r:.100}; name a module of parts or root")


def _check_entries(given: Mapping[str, Source], known: set[str], at: str) -> None:
    for ours in given:
        if ours not in known:
            close = get_close_matches(ours[:100], sorted(known), 1)
            meant = f"did you mean {close[0]}?" if close else f"the spec has {', '.join(sorted(known)[:8])}"
            raise ConfigError(f"{at}.{ours:.100}: the spec has no such weight; {meant}")


def _all_sources(table: Table) -> Iterator[Source]:
    yield from table.root.values()
    yield from table.parts.values()
    for own in table.some_layers:
        yield from own.parts.values()


def _module_of(source: Source) -> str:
    return source if isinstance(source, str) else getattr(source, "module", "")
