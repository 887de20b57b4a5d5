"""Find JSON schemas that require themselves without end: no finite answer can satisfy one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote


def endless(schema: Mapping[str, Any]) -> str | None:
    """Return the pointer of a required subschema ("#/$defs/node") that no finite value satisfies, or None.

    Only references into the same schema are followed, and keywords that require another schema. The compiler finds
    other schemas that cannot be satisfied.
    """
    places = _reached(schema)
    finite = _finite(places)
    return None if "#" in finite else _in_circle(places, finite)


# All demands of a schema must be met. A demand is met by any one of its subschemas, given as pointers.
_Demands = list[tuple[str, ...]]


def _reached(schema: Mapping[str, Any]) -> dict[str, _Demands]:
    """Return the demands of the schema and of each subschema that it requires, by JSON pointer."""
    places: dict[str, _Demands] = {}
    todo: list[tuple[str, Any]] = [("#", schema)]
    while todo:
        place, value = todo.pop()
        if place in places:
            continue
        found = list(_demands(place, value, schema)) if isinstance(value, dict) else []
        places[place] = [tuple(target for target, _ in options) for options in found]
        todo += [option for options in found for option in options]
    return places


def _demands(place: str, value: Mapping[str, Any], root: Mapping[str, Any]) -> Iterator[list[tuple[str, Any]]]:
    """Yield each demand of one schema: pointers and subschemas, one of which must be satisfied."""
    if isinstance(ref := value.get("$ref"), str) and (target := _resolve(ref, root)) is not None:
        yield [target]
    for keyword in ("anyOf", "oneOf", "allOf"):
        parts = value.get(keyword)
        if isinstance(parts, list) and parts:
            options = [(f"{place}/{keyword}/{i}", part) for i, part in enumerate(parts)]
            yield from [[option] for option in options] if keyword == "allOf" else [options]
    if value.get("type") == "object":
        properties, required = value.get("properties"), value.get("required")
        if isinstance(properties, dict) and isinstance(required, list):
            names = dict.fromkeys(name for name in required if isinstance(name, str) and name in properties)
            yield from ([(f"{place}/properties/{_escaped(name)}", properties[name])] for name in names)
    least = value.get("minItems")
    is_full = isinstance(least, int) and least > 0 and "prefixItems" not in value
    if value.get("type") == "array" and is_full and "items" in value:
        yield [(f"{place}/items", value["items"])]


def _finite(places: Mapping[str, _Demands]) -> set[str]:
    """Return the pointers of the subschemas that some finite value satisfies."""
    unmet = {place: len(demands) for place, demands in places.items()}
    users: dict[str, list[tuple[str, int]]] = {}  # by pointer: the demands that the subschema can satisfy
    for place, demands in places.items():
        for number, options in enumerate(demands):
            for option in options:
                users.setdefault(option, []).append((place, number))
    met: set[tuple[str, int]] = set()
    todo = [place for place, number in unmet.items() if not number]
    finite = set(todo)
    while todo:
        for demand in users.get(todo.pop(), ()):
            if demand not in met:
                met.add(demand)
                unmet[demand[0]] -= 1
                if not unmet[demand[0]]:
                    finite.add(demand[0])
                    todo.append(demand[0])
    return finite


def _in_circle(places: Mapping[str, _Demands], finite: set[str]) -> str:
    """Return a pointer that repeats on the path from the root through demands that cannot be met."""
    place, seen = "#", set[str]()
    while place not in seen:
        seen.add(place)
        place = next(options[0] for options in places[place] if not finite.intersection(options))
    return place


def _resolve(ref: str, root: Mapping[str, Any]) -> tuple[str, Any] | None:
    """Return the pointer and the subschema of a reference; None for another document, an anchor, or nothing."""
    if ref != "#" and not ref.startswith("#/"):
        return None
    value: Any = root
    for part in unquote(ref).split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(value, dict) and name in value:
            value = value[name]
        elif (
            isinstance(value, list) and name.isascii() and name.isdecimal() and len(name) < 9 and int(name) < len(value)
        ):
            value = value[int(name)]
        else:
            return None
    return unquote(ref), value


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")
