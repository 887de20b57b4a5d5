"""Altered configs: every field of a config.json, one at a time, with values that a file could contain by mistake.

A flip is one changed field. `flips` yields them for a config as transformers writes it. The fields are those of the
config, those of transformers' class, and those that our reader reads.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, fields
from typing import Any, Final

from transformers import CONFIG_MAPPING

from ridgeline.archs import family_of
from ridgeline.archs.config import HARMLESS, Config

ABSENT: Final = object()
# Fields that identify the file or the program, which other tests cover, and ids of tokens that stand for images and
# sound, which no text has.
SKIPPED: Final = frozenset(
    "model_type architectures transformers_version auto_map _name_or_path quantization_config vision_config "
    "_attn_implementation _experts_implementation dtype torch_dtype "
    "image_token_id audio_token_id video_token_id".split()
)
# Values of other types, for every field.
WRONG: Final[tuple[Any, ...]] = ("text", [], {}, [1], True)
# Kinds of RoPE scaling, with all fields that each of them reads.
SCALINGS: Final[dict[str, dict[str, Any]]] = {
    "default": {"partial_rotary_factor": 0.5},
    "linear": {"factor": 3.0},
    "dynamic": {"factor": 3.0},
    "llama3": {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64
    },
    "yarn": {
        "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 20.0, "beta_slow": 2.0,
        "attention_factor": 1.2, "mscale": 0.7, "mscale_all_dim": 1.3, "truncate": False,
    },
}  # fmt: skip
FEW: Final = 9  # alterations of each field of an added rotation
# Fields that the published code uses but transformers ignores, by model type.
PUBLISHED: Final = {"minimax": {"rotary_dim"}}
ROPES: Final = ("rope_parameters", "rope_scaling")


@dataclass(frozen=True)
class Flip:
    """One altered config. path: the field, with dots. value: the new value as a text."""

    path: str
    value: str
    config: Mapping[str, Any]

    @property
    def label(self) -> str:
        return f"{self.path}={self.value}"


def flips(config: Mapping[str, Any], scalings: bool = False) -> Iterator[Flip]:
    """Yield every flip of a config. scalings: also add each other kind of rotation, and alter its fields."""
    seen: set[str] = set()
    for path, values in _plan(config):
        for value in values:
            yield from _once(seen, config, path, value)
    if scalings:
        for path, base in _rotations(config):
            yield from _once(seen, config, path, base)
            whole = with_value(config, path, base)
            for name, value in base.items():
                for other in (*list(alterations(value))[:FEW], "text"):
                    yield from _once(seen, whole, f"{path}.{name}", other, f"{_kind(base)} ")


def _once(seen: set[str], config: Mapping[str, Any], path: str, value: Any, within: str = "") -> Iterator[Flip]:
    altered = with_value(config, path, value)
    text = json.dumps(altered, sort_keys=True)
    if text not in seen and altered != config:
        seen.add(text)
        yield Flip(path, within + ("absent" if value is ABSENT else json.dumps(value)), altered)


def with_value(config: Mapping[str, Any], path: str, value: Any) -> dict[str, Any]:
    """Return a copy with one field set or removed."""
    copy = deepcopy(dict(config))
    *outer, name = path.split(".")
    inner = copy
    for step in outer:
        inner = inner[step]
    if value is ABSENT:
        inner.pop(name, None)
    else:
        inner[name] = deepcopy(value)
    return copy


def _plan(config: Mapping[str, Any]) -> Iterator[tuple[str, list[Any]]]:
    """Yield (path, values) of all fields."""
    family = family_of(config)
    harmless = HARMLESS | set(family.harmless)
    within = family.within
    for path, value in _paths(config):
        name = path.rsplit(".", 1)[-1]
        yield path, [None, ABSENT, "text", 3] if name in harmless else list(alterations(value))
    described = config[within] if within else config
    prefix = f"{within}." if within else ""
    for name, default in _unwritten(config, described).items():
        few = name in harmless
        yield f"{prefix}{name}", [None, "text", 3] if few else [default, *alterations(default), *GENERIC]


GENERIC: Final[tuple[Any, ...]] = (None, 0, 1, 2, -1, 0.5, 3000.0, True, False, "text", [], {}, [1])


def _paths(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in config.items():
        if name in SKIPPED:
            continue
        yield f"{prefix}{name}", value
        if isinstance(value, Mapping):
            yield from _paths(value, f"{prefix}{name}.")


def _unwritten(config: Mapping[str, Any], described: Mapping[str, Any]) -> dict[str, Any]:
    """Return fields that this config does not have, with the default of transformers' class if it has them."""
    kind = described.get("model_type", config["model_type"])
    found: dict[str, Any] = dict.fromkeys(_read_by_us(config), None)
    if kind in CONFIG_MAPPING:
        found |= {f.name: f.default for f in fields(CONFIG_MAPPING[kind]) if not f.name.startswith("_")}
    plain = (bool, int, float, str, type(None))
    return {
        name: value if isinstance(value, plain) else None
        for name, value in found.items()
        if name not in described and name not in SKIPPED | PUBLISHED.get(str(kind), set())
    }


def _read_by_us(config: Mapping[str, Any]) -> list[str]:
    """Return the fields that our reader reads, present or not."""
    family = family_of(config)
    reader = Config(config[family.within] if family.within else config)
    family.spec(reader)
    return sorted(reader.names_read)


def alterations(value: Any) -> Iterator[Any]:
    """Return other values for a field that has `value`."""
    yield from (ABSENT, None)
    match value:
        case bool():
            yield from (not value, int(value), "true", [], {})
        case int():
            yield from (0, -1, 1, 2, value + 1, value - 1, 2 * value, -value, float(value), value + 0.5, *WRONG)
            yield str(value)
        case float():
            yield from (0, 0.0, -1.0, -value, 2 * value, value / 2, 1, value + 1, *WRONG, str(value))
            yield from (float("inf"), float("nan"))
        case str():
            yield from ("", "gelu", "silu", "relu", "full_attention", "default", "linear", "yarn", 3, True, [], {})
        case list():
            yield from ([], value[:-1], [*value, *value[-1:]], value[::-1], value[:1] * len(value), [None], ["text"])
            yield from ([*value[:-1], "text"], [-1] * len(value), [0] * len(value), "text", 3, {}, True)
        case dict():
            yield from ({}, [], "text", 3, True)
        case None:
            yield from (0, 1, 2, -1, 1.5, 24, *WRONG)


def _kind(rotation: Mapping[str, Any]) -> str:
    return str(rotation.get("rope_type", rotation.get("full_attention")))


def _rotations(config: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (path, rotation) of every kind that can replace the config's own."""
    within = family_of(config).within
    outer = config[within] if within else config
    prefix = f"{within}." if within else ""
    old = {name: value for name, value in outer.items() if name in ROPES}
    if not old:
        return
    path, given = next(iter(old.items()))
    given = given or {}
    per_kind = [kind for kind in ("full_attention", "sliding_attention") if isinstance(given.get(kind), dict)]
    for name, scaling in SCALINGS.items():
        flat = {"rope_type": name, "rope_theta": 3000.0, **scaling}
        yield f"{prefix}{path}", flat
        if path == "rope_parameters":
            yield f"{prefix}rope_scaling", {key: v for key, v in flat.items() if key != "rope_theta"}
        for kind in per_kind:
            yield f"{prefix}{path}.{kind}", flat
