"""Fields of a body that nobody knows: `--unknown-fields ignore` leaves them out and says so in the answer."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ValidationError

UnknownFields = Literal["error", "ignore"]
UNKNOWN_FIELDS: tuple[UnknownFields, ...] = ("error", "ignore")
ROUNDS = 8  # validation ends at the first wrong element of a list, so fields may come to light one by one
SHOWN = 20  # names in a warning
SHOWN_CHARACTERS = 40  # of one

B = TypeVar("B", bound=BaseModel)


def drop(errors: Iterable[Mapping[str, Any]], body: Any) -> list[str]:
    """Remove from a body, in place, the fields that pydantic does not know; their names, with where they were."""
    places = [error["loc"] for error in errors if error["type"] == "extra_forbidden"]
    return [name for place in places if (name := _drop(place, body))]


def _drop(place: Sequence[str | int], body: Any) -> str:
    """The name of the field at a place, which is removed; "" where there is none.

    A place names the kinds of values too that pydantic tried on its way ("NamedTool"); those are no keys.
    """
    path, owner = [], body
    for step in place[:-1]:
        here = isinstance(owner, dict) and step in owner
        if here or (isinstance(owner, list) and isinstance(step, int) and step < len(owner)):
            owner = owner[step]
            path.append(str(step))
    if not isinstance(owner, dict) or place[-1] not in owner:
        return ""
    del owner[place[-1]]
    return ".".join([*path, str(place[-1])])


def read(kind: type[B], body: Any, unknown: UnknownFields) -> tuple[B, list[str]]:
    """A body, and the fields that were ignored in it. Raises ValidationError for what is wrong otherwise."""
    ignored: list[str] = []
    if unknown == "error":
        return kind.model_validate(body), ignored
    body = json.loads(json.dumps(body))  # a copy, since fields are removed from it
    for _ in range(ROUNDS):
        try:
            return kind.model_validate(body), ignored
        except ValidationError as e:
            found = drop(e.errors(include_url=False), body)
            if not found:
                raise
            ignored += found
    return kind.model_validate(body), ignored


def warning(ignored: Sequence[str]) -> str:
    """What to tell of fields that were ignored."""
    names = [name[:SHOWN_CHARACTERS] for name in ignored[:SHOWN]]
    more = f" and {len(ignored) - SHOWN} more" if len(ignored) > SHOWN else ""
    return f"unknown fields are ignored: {', '.join(names)}{more}"


def header(ignored: Sequence[str]) -> str:
    """The value of the header Warning (RFC 7234, 5.5: code, agent, quoted text). Only visible ASCII is in it."""
    text = warning(ignored).encode("ascii", "backslashreplace").decode()
    printable = "".join(c if c.isprintable() and c not in '"\\' else "?" for c in text)
    return f'299 ridgeline "{printable}"'
