"""X-Request-Id: return the client's id of a request in the answer's headers, or a new id if the client sent none."""

from __future__ import annotations

import re
import uuid
from typing import TypeVar

from fastapi import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ridgeline.serve.api.types import MAX_REQUEST_ID, ChatBody, CompletionBody
from ridgeline.serve.api.types_responses import ResponseBody
from ridgeline.serve.http.errors import APIError

HEADER = b"x-request-id"
_VALID = re.compile(rb"[!-~]{1,%d}" % MAX_REQUEST_ID)  # as types.RequestId

T = TypeVar("T", ChatBody, CompletionBody, ResponseBody)


class RequestIds:
    """ASGI middleware that adds the request's id to every response."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = dict(scope["headers"]).get(HEADER)
        name = given if given is not None and _VALID.fullmatch(given) else uuid.uuid4().hex.encode()

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], (HEADER, name)]}
            await send(message)

        await self._app(scope, receive, sending)


def named(body: T, request: Request) -> T:
    """Return the body with the id of the header X-Request-Id, if there is one. Raises APIError for an invalid id."""
    given = request.headers.get("x-request-id")
    if given is None:
        return body
    if not _VALID.fullmatch(given.encode("latin-1", "replace")):
        raise APIError(
            400, f"X-Request-Id must have 1 to {MAX_REQUEST_ID} visible ASCII characters", param="X-Request-Id"
        )
    return body.model_copy(update={"request_id": given})
