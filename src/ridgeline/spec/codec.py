"""ModelSpec to JSON and back, strictly: the config file of a model of our own making.

Every part is an object with its type's name under "type"; fields that hold their default are left out. Equal
neighboring layers are written once, with their count: [{"count": 5, "layer": {...}}, ...].
"""

from __future__ import annotations

import sys
import types
import typing
from dataclasses import MISSING, fields, is_dataclass
from itertools import groupby
from typing import Any

from ridgeline.errors import ConfigError
from ridgeline.spec import heads, model

MAX_LAYERS = 10_000  # limit for all layers together, so that a typing error does not fill the memory
Json = Any  # a value that json.loads returns


def to_json(spec: model.ModelSpec) -> Json:
    """Return a plain object for `json.dumps`; `from_json(to_json(spec)) == spec`."""
    out = _encode(spec)
    out["layers"] = [{"count": len(list(run)), "layer": _encode(layer)} for layer, run in groupby(spec.layers)]
    return out


def from_json(value: Json) -> model.ModelSpec:
    """Read what `to_json` wrote. Raises ConfigError, with its position, for anything unknown, missing or mistyped."""
    if not isinstance(value, dict) or not isinstance(value.get("layers"), list):
        raise ConfigError('a model spec is an object with "layers": [{"count": n, "layer": {...}}, ...]')
    layers: list[Json] = []
    for i, run in enumerate(value["layers"]):
        fits = isinstance(run, dict) and set(run) == {"count", "layer"} and type(run["count"]) is int
        if not fits or not 1 <= run["count"] <= MAX_LAYERS:
            raise ConfigError(f'layers[{i}]: expected {{"count": 1 to {MAX_LAYERS}, "layer": {{...}}}}')
        if len(layers) + run["count"] > MAX_LAYERS:
            raise ConfigError(f"layers[{i}]: the model has more than {MAX_LAYERS} layers; lower the counts")
        layers += [run["layer"]] * run["count"]
    spec = _decode({**value, "layers": layers}, model.ModelSpec, "spec")
    assert isinstance(spec, model.ModelSpec)
    return spec


def head_to_json(spec: heads.HeadSpec) -> Json:
    """Return a head for speculative decoding as a plain object; `head_from_json(head_to_json(spec)) == spec`."""
    return _encode(spec)


def head_from_json(value: Json) -> heads.HeadSpec:
    """Read what `head_to_json` wrote. Raises ConfigError as `from_json` does."""
    found: heads.HeadSpec = _decode(value, heads.HeadSpec, "head")
    return found


def part_to_json(part: Any) -> Json:
    """Return a part of any kind as a plain object; `part_from_json` with its kind returns it."""
    return _encode(part)


def part_from_json(value: Json, expected: Any, where: str) -> Any:
    """Return `value` as an instance of the annotation `expected`. where: the position that errors name.

    Raises ConfigError as `from_json` does.
    """
    return _decode(value, expected, where)


def _encode(value: Any) -> Json:
    if is_dataclass(value):
        out: dict[str, Json] = {"type": type(value).__name__}
        for f in fields(value):
            item = getattr(value, f.name)
            if f.default is MISSING or item != f.default:
                out[f.name] = _encode(item)
        return out
    if isinstance(value, tuple):
        return [_encode(v) for v in value]
    return value


def _decode(value: Json, expected: Any, where: str) -> Any:
    """Return `value` as an instance of the annotation `expected` (a part, a scalar, a union, a literal or a tuple)."""
    origin = typing.get_origin(expected)
    if origin in (typing.Union, types.UnionType):
        return _decode_union(value, typing.get_args(expected), where)
    if origin is typing.Literal:
        if value in typing.get_args(expected):
            return value
    elif origin is tuple:
        item, *others = typing.get_args(expected)
        if isinstance(value, list) and (others == [Ellipsis] or len(value) == 1 + len(others)):
            return tuple(_decode(v, item, f"{where}[{i}]") for i, v in enumerate(value))
    elif is_dataclass(expected):
        return _decode_part(value, expected, where)
    elif expected is float and type(value) in (int, float) and abs(value) <= sys.float_info.max:
        return float(value)
    elif expected in (int, str, bool, type(None)) and type(value) is expected:
        return value
    raise ConfigError(f"{where}: {value!r:.100} is not {getattr(expected, '__name__', expected)}")


def _decode_union(value: Json, options: tuple[Any, ...], where: str) -> Any:
    if value is None and type(None) in options:
        return None
    if isinstance(value, dict):
        parts = [o for o in options if is_dataclass(o)]
        for part in parts:
            if isinstance(part, type) and value.get("type") == part.__name__:
                return _decode_part(value, part, where)
        known = ", ".join(p.__name__ for p in parts if isinstance(p, type))
        raise ConfigError(f"{where}: type {value.get('type')!r:.100} is none of {known}")
    scalars = [o for o in options if o is not type(None) and not is_dataclass(o)]
    for option in scalars:
        return _decode(value, option, where)
    raise ConfigError(f"{where}: {value!r:.100} is not an object")


def _decode_part(value: Json, part: Any, where: str) -> Any:
    name = part.__name__
    if not isinstance(value, dict) or value.get("type") != name:
        raise ConfigError(f'{where}: expected an object with "type": "{name}"')
    hints = typing.get_type_hints(part)
    known = {f.name: f for f in fields(part)}
    if unknown := set(value) - set(known) - {"type"}:
        raise ConfigError(f"{where}: {name} has no field {', '.join(sorted(unknown)):.200}")
    if missing := [n for n, f in known.items() if f.default is MISSING and n not in value]:
        raise ConfigError(f"{where}: {name} needs {', '.join(missing)}")
    found = {n: _decode(value[n], hints[n], f"{where}.{n}") for n in known if n in value}
    try:
        return part(**found)
    except ValueError as e:
        raise ConfigError(f"{where}: {e}") from None
