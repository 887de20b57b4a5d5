"""Fields of other APIs that have no effect here: each is declared as such, and the answer's header names it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fastapi.responses import Response
from pydantic import BaseModel, Field

from ridgeline.serve.http import unknown

MARK = "x-no-effect"


def idle(why: str) -> Any:
    """Declare a field that is accepted and has no effect. why: the reason, for /openapi.json."""
    return Field(default=None, description=f"No effect: {why}", json_schema_extra={MARK: True})


def given(body: BaseModel) -> list[str]:
    """Return the paths of a body's fields without effect that the client has set, each once, without indices."""
    return list(dict.fromkeys(_idle(body, "")))


def _idle(value: Any, path: str) -> Iterator[str]:
    if isinstance(value, list):
        for item in value:
            yield from _idle(item, path)
    if not isinstance(value, BaseModel):
        return
    for name, field in type(value).model_fields.items():
        if name not in value.model_fields_set:
            continue
        here, found = f"{path}.{name}".lstrip("."), getattr(value, name)
        if isinstance(field.json_schema_extra, dict) and MARK in field.json_schema_extra:
            if found is not None:
                yield here
        else:
            yield from _idle(found, here)


def told(response: Response, body: BaseModel) -> Response:
    """Return the response with a header Warning that names the request's fields without effect."""
    if names := given(body):
        response.headers.append("warning", unknown.header(names, "fields without effect"))
    return response
