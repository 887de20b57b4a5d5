"""Read the bodies of requests: parse small ones in this process and large ones in a helper process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from itertools import count
from typing import Any

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.types import Scope

from ridgeline.errors import RequestError
from ridgeline.serve.helpers.parse import parse
from ridgeline.serve.http import unknown
from ridgeline.serve.http.errors import APIError
from ridgeline.serve.service import Service

SMALL_BODY = 1 << 16  # bytes of a body up to which parsing takes no noticeable time
LARGE_BODY = 1 << 20  # bytes of a body that a helper parses
CURL = b"application/x-www-form-urlencoded"  # the type of a body that `curl -d` sends unless it is told another
BROWSERS = frozenset({b"origin", b"sec-fetch-site"})  # headers that a browser adds, and no page can leave out


class _Request(Request):
    """A request whose body is parsed once. parsed: the JSON value that the endpoint receives."""

    parsed: Any = None
    is_parsed = False

    async def json(self) -> Any:
        if not self.is_parsed:
            self.parsed, self.is_parsed = await self._parse(), True
        return self.parsed

    async def _parse(self) -> Any:
        body = await self.body()
        service: Service = self.app.state.service
        try:
            if len(body) > LARGE_BODY:
                return await service.helpers.parse(body)
            found = parse(body)
            if len(body) > SMALL_BODY:
                await asyncio.sleep(0)  # lets streams write between parsing and validation
            return found
        except RequestError as e:
            raise APIError(400, str(e), code="too_long") from None


class BodyRoute(APIRoute):
    """An endpoint that reads its body in this way and treats unknown fields as --unknown-fields says."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            one = _Request(_of_curl(request.scope), request.receive)
            if request.app.state.service.options.unknown_fields == "error":
                return await handler(one)
            return await _forgiving(handler, one)

        return handle


def _of_curl(scope: Scope) -> Scope:
    """Return a request in which the body of a plain `curl -d` is JSON, as curl's users mean it.

    A browser sends a body of this type for a page of any site without asking the server first, so requests of browsers
    stay as they are.
    """
    headers: list[tuple[bytes, bytes]] = scope["headers"]
    names = {name for name, _ in headers}
    if names & BROWSERS or (b"content-type", CURL) not in headers:
        return scope
    others = [one for one in headers if one[0] != b"content-type"]
    return {**scope, "headers": [*others, (b"content-type", b"application/json")]}


async def _forgiving(handler: Callable[[Request], Coroutine[Any, Any, Response]], request: _Request) -> Response:
    """Answer a request without its unknown fields. The response's header Warning names them."""
    ignored: list[str] = []
    for attempt in count(1):
        try:
            response = await handler(request)
        except RequestValidationError as e:
            errors = [{**error, "loc": error["loc"][1:]} for error in e.errors()]  # without the leading "body"
            found = unknown.drop(errors, request.parsed)
            if not found or attempt > unknown.ATTEMPTS:
                raise
            ignored += found
        else:
            break
    if ignored:
        response.headers.append("warning", unknown.header(ignored))
    return response
