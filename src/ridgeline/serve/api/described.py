"""What /openapi.json says of each endpoint's responses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi.responses import JSONResponse
from pydantic import BaseModel

from ridgeline.serve.api.types_answers import ErrorAnswer
from ridgeline.serve.http.errors import dumps

ERRORS: dict[int | str, str] = {
    400: "The request is wrong; the message says where.",
    401: "A valid API key is needed.",
    404: "There is no such model, or no such URL.",
    405: "The URL does not support this method; the Allow header lists the methods that it supports.",
    413: "The body is too large.",
    429: "The queue is full, or the key has too many requests open; Retry-After says when to come back.",
    500: "A fault of the server, whose log says more.",
    503: "The engine is starting, or the server is stopping; Retry-After says when to come back.",
    "default": "Any other error.",
}


class JSON(JSONResponse):
    """Any object as JSON."""

    def render(self, content: Any) -> bytes:
        return dumps(content)


def answers(model: type[BaseModel], *, stream: str = "") -> Mapping[int | str, dict[str, Any]]:
    """The `responses` of an endpoint. stream: what the events of a stream hold, where it can answer with one."""
    found: dict[str, Any] = {"model": model, "description": str(model.__doc__).split("\n\n")[0]}
    if stream:
        found["content"] = {"text/event-stream": {"schema": {"type": "string", "description": stream}}}
    return {200: found}


def text() -> Mapping[int | str, dict[str, Any]]:
    """The `responses` of an endpoint whose answer is a text, and whose errors are JSON as those of all others."""
    error = {"application/json": {"schema": {"$ref": f"#/components/schemas/{ErrorAnswer.__name__}"}}}
    return {status: {"description": text, "content": error} for status, text in ERRORS.items()}


def errors() -> Mapping[int | str, dict[str, Any]]:
    """The `responses` that all endpoints share."""
    return {status: {"model": ErrorAnswer, "description": text} for status, text in ERRORS.items()}
