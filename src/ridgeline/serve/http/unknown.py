"""Remove unknown fields from a body and name them in a warning, for `--unknown-fields ignore`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ValidationError

UnknownFields = Literal["error", "ignore"]
UNKNOWN_FIELDS: tuple[UnknownFields, ...] = ("error", "ignore")
ATTEMPTS = 8  # validation stops at the first wrong element of a list, so it may find unknown fields one by one
SHOWN = 20  # number of names in a warning
SHOWN_CHARACTERS = 40  # number of characters of a name in a warning

B = TypeVar("B", bound=BaseModel)


def drop(errors: Iterable[Mapping[str, Any]], body: Any) -> list[str]:
    """Remove the fields that pydantic's errors call unknown from a body, in place. Return their paths."""
    locations = [error["loc"] for error in errors if error["type"] == "extra_forbidden"]
    return [name for location in locations if (name := _drop(location, body))]


def _drop(location: Sequence[str | int], body: Any) -> str:
    """Remove the field at a location. Return its path, or "" if it does not exist.

    pydantic's locations also contain names of types that it tried ("NamedTool"), which are not keys of the body.
    """
    path, owner = [], body
    for step in location[:-1]:
        here = isinstance(owner, dict) and step in owner
        if here or (isinstance(owner, list) and isinstance(step, int) and step < len(owner)):
            owner = owner[step]
            path.append(str(step))
    if not isinstance(owner, dict) or location[-1] not in owner:
        return ""
    del owner[location[-1]]
    return ".".join([*path, str(location[-1])])


def read(kind: type[B], body: Any, unknown: UnknownFields) -> tuple[B, list[str]]:
    """Validate a body. Return it and the paths of its ignored fields. Raises ValidationError for other errors."""
    ignored: list[str] = []
    if unknown == "error":
        return kind.model_validate(body), ignored
    body = json.loads(json.dumps(body))  # a copy, since fields are removed from it
    for _ in range(ATTEMPTS):
        try:
            return kind.model_validate(body), ignored
        except ValidationError as e:
            found = drop(e.errors(include_url=False), body)
            if not found:
                raise
            ignored += found
    return kind.model_validate(body), ignored


def warning(ignored: Sequence[str], about: str = "unknown fields are ignored") -> str:
    """Return the text of the warning about fields."""
    names = [name[:SHOWN_CHARACTERS] for name in ignored[:SHOWN]]
    more = f" and {len(ignored) - SHOWN} more" if len(ignored) > SHOWN else ""
    return f"{about}: {', '.join(names)}{more}"


def header(ignored: Sequence[str], about: str = "unknown fields are ignored") -> str:
    """Return the value of the header Warning (RFC 7234, 5.5: code, agent, quoted text), in visible ASCII."""
    text = warning(ignored, about).encode("ascii", "backslashreplace").decode()
    printable = "".join(c if c.isprintable() and c not in '"\\' else "?" for c in text)
    return f'299 ridgeline "{printable}"'
