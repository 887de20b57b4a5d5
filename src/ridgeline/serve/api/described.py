"""Describe each endpoint's responses for /openapi.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi.responses import JSONResponse
from pydantic import BaseModel

from ridgeline.serve.api.types_answers import ErrorAnswer
from ridgeline.serve.http.errors import dumps

ERRORS: dict[int | str, str] = {
    400: "The request is invalid; the message says why.",
    401: "A valid API key is needed.",
    404: "The model or the URL does not exist.",
    405: "The URL does not support this method; the Allow header lists the methods that it supports.",
    413: "The body is too large.",
    429: "The queue is full, or the key has too many open requests; Retry-After says when to retry, in seconds.",
    500: "An internal error of the server; its log has the details.",
    503: "The engine is starting, or the server is stopping; Retry-After says when to retry, in seconds.",
    "default": "Any other error.",
}


class JSON(JSONResponse):
    """A response with any object as JSON."""

    def render(self, content: Any) -> bytes:
        return dumps(content)


def answers(model: type[BaseModel], *, stream: str = "") -> Mapping[int | str, dict[str, Any]]:
    """Return the `responses` of an endpoint. stream: description of the events, if the endpoint can stream."""
    found: dict[str, Any] = {"model": model, "description": str(model.__doc__).split("\n\n")[0]}
    if stream:
        found["content"] = {"text/event-stream": {"schema": {"type": "string", "description": stream}}}
    return {200: found}


def text() -> Mapping[int | str, dict[str, Any]]:
    """Return the `responses` of an endpoint whose answer is plain text and whose errors are JSON."""
    error = {"application/json": {"schema": {"$ref": f"#/components/schemas/{ErrorAnswer.__name__}"}}}
    return {status: {"description": text, "content": error} for status, text in ERRORS.items()}


def errors() -> Mapping[int | str, dict[str, Any]]:
    """Return the error `responses` that all endpoints share."""
    return {status: {"model": ErrorAnswer, "description": text} for status, text in ERRORS.items()}
